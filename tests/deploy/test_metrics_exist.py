"""Every metric and label that Prometheus' rules and Grafana's dashboard name is in the contract and is exposed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import yaml
from support.deploy_commands import DEPLOY, text
from support.exposed_metrics import whole_exposition
from swarm_node.metrics.metric_contract import METRICS

NAME = re.compile(r"(?<![\w:$])((?:swarm|process)_[a-z0-9_]+)")
SELECTOR = re.compile(r"((?:swarm|process)_[a-z0-9_]+)\{([^}]*)\}")
GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")
SCRAPED = {"instance", "job", "le"}
"""Labels that Prometheus itself puts on, and a histogram's."""


def rules() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load(text("prometheus/rules.yml"))["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def panels() -> Iterator[tuple[str, str]]:
    dashboard = json.loads(text("grafana/dashboards/swarm.json"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable["name"], variable["query"]["query"]


QUERIES = {f"{kind} {name}": query for kind, each in (("rule", rules), ("panel", panels)) for name, query in each()}


def metric_of(name: str) -> str:
    """The contract's name of a sample: histograms have three kinds."""
    return name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name)


def test_each_metric_that_is_asked_for_is_in_the_contract_and_exposed() -> None:
    exposed = {sample.name for sample in whole_exposition()}
    for query, asked in QUERIES.items():
        named = NAME.findall(asked)
        assert {name for name in named if metric_of(name) not in METRICS or name not in exposed} == set(), query
        assert named or "up{" in asked or "swarm:" in asked, query


def test_each_label_that_is_asked_for_is_its_metrics() -> None:
    for query, asked in QUERIES.items():
        for name, selector in SELECTOR.findall(asked):
            labels = set(re.findall(r"(\w+)\s*[=!]~?\"", selector))
            assert labels <= {*METRICS[metric_of(name)].labels, *SCRAPED}, (query, name)
        known = {label for name in NAME.findall(asked) for label in METRICS[metric_of(name)].labels} | SCRAPED
        for grouped in GROUPED.findall(asked):
            assert set(re.findall(r"\w+", grouped)) <= known, query


def test_each_value_of_a_label_that_is_asked_for_is_one_of_the_contracts() -> None:
    for query, asked in QUERIES.items():
        for name, selector in SELECTOR.findall(asked):
            for label, value in re.findall(r"(\w+)=\"([^\"]*)\"", selector):
                if label not in SCRAPED:
                    assert f"`{value}`" in METRICS[metric_of(name)].labels[label], query


def test_each_query_closes_what_it_opens_and_counters_are_read_as_rates() -> None:
    for query, asked in QUERIES.items():
        for opening, closing in ("()", "[]", "{}"):
            assert asked.count(opening) == asked.count(closing), query
        for name in NAME.findall(asked):
            spec = METRICS[metric_of(name)]
            moves = re.search(rf"(rate|increase)\({name}\b", asked)
            if spec.kind == "gauge":
                assert not moves, f"{query}: {name} is a gauge"
            elif name != "swarm_trainer_digest_mismatches_total":  # shown as it is: any at all is news
                assert moves, f"{query}: {name} only grows"


def test_prometheus_reads_the_services_of_the_compose_file_on_their_port() -> None:
    services = yaml.safe_load(text("compose.yaml"))["services"]
    [job] = yaml.safe_load(text("prometheus/prometheus.yml"))["scrape_configs"]
    hosts = [target.partition(":")[0] for each in job["static_configs"] for target in each["targets"]]
    assert set(hosts) <= set(services)
    assert len(hosts) == len(set(hosts))


def test_grafana_finds_its_data_source_and_its_dashboards() -> None:
    [source] = yaml.safe_load(text("grafana/provisioning/datasources/prometheus.yml"))["datasources"]
    [provider] = yaml.safe_load(text("grafana/provisioning/dashboards/swarm.yml"))["providers"]
    dashboard = json.loads(text("grafana/dashboards/swarm.json"))
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"] if "targets" in panel} == {source["uid"]}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


def test_promtool_takes_rules_and_configuration() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: queries are checked by name, label and brackets only")
    for check in (("check", "rules", "rules.yml"), ("check", "config", "prometheus.yml")):
        done = subprocess.run(
            [promtool, *check], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
