"""The chart: its values are what its schema allows and its templates use; rendered, its pods run what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_commands import DEPLOY, PEER_ID, config_of
from swarm_node import daemon

CHART = DEPLOY / "helm" / "swarm"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text("utf-8"))
TEMPLATES = "\n".join(path.read_text("utf-8") for path in sorted((CHART / "templates").iterdir()))
# what a user hands on as it is, whatever is in it
FREE = ("resources", "nodeSelector", "tolerations", "metricsFrom", "global")

Manifest = dict[str, Any]


def paths(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and name not in FREE:
            yield from paths(value, f"{above}{name}.")
        else:
            yield above + name


def declared(schema: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, entry in schema["properties"].items():
        found = SCHEMA["definitions"][entry["$ref"].split("/")[-1]] if "$ref" in entry else entry
        if "properties" in found and name not in FREE:
            assert found["additionalProperties"] is False, f"a misspelt value below {above}{name} would pass"
            assert set(found["required"]) == set(found["properties"])
            yield from declared(found, f"{above}{name}.")
        elif name != "global":
            yield above + name


def test_schema_and_values_name_the_same() -> None:
    assert SCHEMA["additionalProperties"] is False
    assert sorted(declared(SCHEMA)) == sorted(paths(VALUES))


def test_templates_use_every_value_and_no_other() -> None:
    used = set(re.findall(r"\.Values\.([\w.]+)", TEMPLATES))
    # the placement of a role is read by one template for all
    used |= {f"{role}.{name}" for role in ("seed", "nodes", "gateway") for name in ("nodeSelector", "tolerations")}
    assert used - {"seed", "nodes", "gateway"} == set(paths(VALUES))


def test_templates_include_what_is_defined_and_end_what_they_begin() -> None:
    assert set(re.findall(r'include "([\w.]+)"', TEMPLATES)) == set(re.findall(r'define "([\w.]+)"', TEMPLATES))
    begun = re.findall(r"\{\{-? (?:if|range|with|define) ", TEMPLATES)
    assert len(begun) == len(re.findall(r"\{\{-? end ", TEMPLATES))


def test_chart_says_what_it_is() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert (chart["apiVersion"], chart["name"]) == ("v2", "swarm")


# --- rendered by Helm itself -----------------------------------------------------------------------------------------

Render = Callable[..., list[Manifest]]


def by_binary(values: Mapping[str, Any], file: Path) -> str:
    file.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    command = ["helm", "template", "demo", CHART, "--namespace", "prod", "--values", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def by_package(values: Mapping[str, Any], _file: Path) -> str:
    import helm_python  # noqa: PLC0415 (present only where it is installed)

    try:
        with helm_python.Chart.load(CHART) as chart:
            chart.validate_schema(dict(values))
            rendered = chart.render(dict(values), name="demo", namespace="prod")
    except helm_python.HelmError as error:
        raise ValueError(str(error)) from error
    return "\n---\n".join(body for name, body in sorted(rendered.items()) if name.endswith(".yaml"))


@pytest.fixture
def render(tmp_path: Path) -> Render:
    """The manifests for values on top of the chart's. ValueError if Helm refuses them."""
    way = by_binary if shutil.which("helm") else by_package
    if way is by_package:
        pytest.importorskip("helm_python", reason="neither helm nor helm-python-sdk is installed: nothing was rendered")

    def with_values(values: Mapping[str, Any]) -> list[Manifest]:
        documents = yaml.safe_load_all(way(values, tmp_path / "values.yaml"))
        return [document for document in documents if document]

    return with_values


LEAST = {"seed": {"peerId": PEER_ID}}
MOST = {
    "seed": {
        "peerId": PEER_ID,
        "announce": ["/dns4/seed.example.org/tcp/4001"],
        "service": {"type": "LoadBalancer", "port": 4001},
        "nodeSelector": {"zone": "a"},
    },
    "peers": [f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER_ID}"],
    "nodes": {"modelClaim": "models", "model": "/models/story", "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    "gateway": {"apiKeysSecret": "keys", "historySecret": "history", "replicas": 2},
    "drainSeconds": 120,
}
JOINING = {
    "seed": {"enabled": False},
    "peers": [f"/dns4/seed.example.org/tcp/4001/p2p/{PEER_ID}"],
    "gateway": {"enabled": False},
    "networkPolicy": {"enabled": False},
}


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {
        found["metadata"]["name"]: found["spec"]["template"]["spec"]
        for found in manifests
        if found["kind"] == "StatefulSet"
    }


@pytest.mark.parametrize("values", [LEAST, MOST, JOINING], ids=["least", "most", "joining"])
def test_rendered_pods_run_what_the_program_has(render: Render, values: Mapping[str, Any]) -> None:
    found = pods(render(values))
    assert found
    for pod in found.values():
        [container] = pod["containers"]
        environment = {entry["name"]: str(entry.get("value", "x")) for entry in container["env"]}
        config = config_of(container["args"], environment)
        assert config.peers or container["name"] == "seed"
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            config_of(container[probe]["exec"]["command"][1:])
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["swarm-node", "drain"]
        assert pod["terminationGracePeriodSeconds"] > config.drain_s + 2 * daemon.CLOSE_S


def test_nothing_of_the_cluster_reaches_a_pods_environment(render: Render) -> None:
    """SWARM_SEED_SERVICE_HOST, which Kubernetes would set, is no setting: the daemon would refuse to start."""
    assert {pod["enableServiceLinks"] for pod in pods(render(MOST)).values()} == {False}


def test_pods_are_confined(render: Render) -> None:
    for pod in pods(render(MOST)).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_members_join_through_the_releases_own_seed(render: Render) -> None:
    manifests = render(LEAST)
    [service] = [
        found for found in manifests if found["kind"] == "Service" and found["metadata"]["name"] == "demo-seed"
    ]
    container = pods(manifests)["demo-node"]["containers"][0]
    [peers] = [entry["value"] for entry in container["env"] if entry["name"] == "SWARM_PEERS"]
    assert peers == f"/dns4/demo-seed.prod.svc/tcp/{service['spec']['ports'][0]['port']}/p2p/{PEER_ID}"
    assert service["spec"]["selector"].items() <= labels(manifests, "demo-seed").items()


def labels(manifests: list[Manifest], name: str) -> dict[str, str]:
    [found] = [each for each in manifests if each["kind"] == "StatefulSet" and each["metadata"]["name"] == name]
    assert found["spec"]["selector"]["matchLabels"].items() <= found["spec"]["template"]["metadata"]["labels"].items()
    return found["spec"]["template"]["metadata"]["labels"]


def test_policies_and_budgets_mean_the_pods_that_there_are(render: Render) -> None:
    manifests = render(MOST)
    policies = [found for found in manifests if found["kind"] == "NetworkPolicy"]
    budgets = [found for found in manifests if found["kind"] == "PodDisruptionBudget"]
    assert {found["metadata"]["name"] for found in policies} == {"demo-seed", "demo-node", "demo-gateway"}
    assert {found["metadata"]["name"] for found in budgets} == {"demo-node", "demo-gateway"}
    all_pods = pods(manifests)
    for found in (*policies, *budgets):
        name = found["metadata"]["name"]
        selector = found["spec"].get("podSelector") or found["spec"]["selector"]
        assert selector["matchLabels"].items() <= labels(manifests, name).items()
    for found in policies:
        ports = {port["name"] for port in all_pods[found["metadata"]["name"]]["containers"][0]["ports"]}
        opened = {port["port"] for rule in found["spec"]["ingress"] for port in rule["ports"]}
        assert opened <= ports


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "peerId"),
        ({"seed": {"peerId": "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWKPbdG"}}, "peerId"),
        ({"seed": {"enabled": False}}, "nobody to join through"),
        ({**LEAST, "node": {"count": 1}}, "node"),
        ({**LEAST, "nodes": {"dtype": "fp8"}}, "dtype"),
        ({**LEAST, "drainSeconds": -1}, "drainSeconds"),
        ({**LEAST, "peers": ["/ip4/203.0.113.7/tcp/4001"]}, "peers"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(render: Render, wrong: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        render(wrong)


def test_helm_lints_it(render: Render, tmp_path: Path) -> None:
    render(LEAST)
    if shutil.which("helm"):
        (tmp_path / "least.yaml").write_text(yaml.safe_dump(LEAST), encoding="utf-8")
        command = ["helm", "lint", "--strict", CHART, "--values", tmp_path / "least.yaml"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return
    import helm_python  # noqa: PLC0415 (present only where it is installed)

    assert helm_python.lint(CHART, LEAST, strict=True)["errors"] == []
