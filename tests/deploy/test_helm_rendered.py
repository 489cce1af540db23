"""The chart as Helm renders it: pods run what the program has, Kubernetes knows every key, wrong values are refused."""

from __future__ import annotations

import copy
import functools
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deploy_commands import DEPLOY, PEER_ID, config_of, text
from swarm_node import daemon
from swarm_node.settings.config import Config

CHART = DEPLOY / "helm" / "swarm"

Manifest = dict[str, Any]


def helm(*words: str | Path, values: Mapping[str, Any] | None = None) -> str:
    """What Helm prints with values on top of the chart's. ValueError if it refuses."""
    return _printed(words, yaml.safe_dump(dict(values or {})))


@functools.cache
def _printed(words: tuple[str | Path, ...], values: str) -> str:
    program = shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed: nothing was rendered")
    command = [program, *words, "--values", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise ValueError(done.stdout + done.stderr)
    return done.stdout


def render(values: Mapping[str, Any]) -> list[Manifest]:
    """The manifests for values on top of the chart's. ValueError if Helm refuses them."""
    return manifests_of(helm(*TEMPLATE, CHART, values=values))


def manifests_of(rendered: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(rendered) if document]


TEMPLATE = ("template", "demo", "--namespace", "prod")
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
    "gateway": {
        "apiKeysSecret": "keys",
        "historySecret": "history",
        "replicas": 2,
        "hosts": ["swarm.example.org", "*.example.net"],
        "trustedProxies": ["10.42.0.0/16", "::1"],
    },
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


ALL = pytest.mark.parametrize("values", [LEAST, MOST, JOINING], ids=["least", "most", "joining"])


@ALL
def test_rendered_pods_run_what_the_program_has(values: Mapping[str, Any]) -> None:
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


def test_nothing_of_the_cluster_reaches_a_pods_environment() -> None:
    """SWARM_SEED_SERVICE_HOST, which Kubernetes would set, is no setting: the daemon would refuse to start."""
    assert {pod["enableServiceLinks"] for pod in pods(render(MOST)).values()} == {False}


def test_pods_are_confined() -> None:
    for pod in pods(render(MOST)).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_members_join_through_the_releases_own_seed() -> None:
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


def test_policies_and_budgets_mean_the_pods_that_there_are() -> None:
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
        ({**LEAST, "drainSeconds": "30"}, "drainSeconds"),
        ({**LEAST, "metricsPort": 0}, "metricsPort"),
        ({**LEAST, "peers": ["/ip4/203.0.113.7/tcp/4001"]}, "peers"),
        ({**LEAST, "gateway": {"hosts": ["https://swarm.example.org"]}}, "hosts"),
        ({**LEAST, "gateway": {"hosts": "swarm.example.org"}}, "hosts"),
        ({**LEAST, "gateway": {"hosts": ["a.example.org,*"]}}, "hosts"),
        ({**LEAST, "gateway": {"trustedProxies": ["ingress.example.org"]}}, "trustedProxies"),
        ({**LEAST, "gateway": {"service": {"type": "Public"}}}, "type"),
        ({**LEAST, "gateway": {"apiKeysSecret": "My Keys"}}, "apiKeysSecret"),
        ({**LEAST, "nodes": {"storage": "20 GB"}}, "storage"),
        ({**LEAST, "nodes": {"maxMemory": "a lot"}}, "maxMemory"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(wrong: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        render(wrong)


@ALL
def test_helm_lints_it(values: Mapping[str, Any]) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, values=values)


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_kubernetes_knows_every_key(tmp_path: Path, version: str) -> None:
    """From the oldest version that the chart takes: what it does not know, Kubernetes would drop or refuse."""
    manifests = [found for values in (LEAST, MOST, JOINING) for found in render(values)]
    wrong = next(copy.deepcopy(found) for found in manifests if found["kind"] == "StatefulSet")
    wrong["metadata"]["name"] = "wrong"
    pod = wrong["spec"]["template"]["spec"]
    pod["terminationGracePeriod"] = pod.pop("terminationGracePeriodSeconds")
    # the first and the last are refused, so all between were looked at
    refused = refused_by_kubernetes([wrong, *manifests, wrong], version, tmp_path).strip().splitlines()
    assert len(refused) == 2
    assert all("statefulset/wrong" in line and "terminationGracePeriod" in line for line in refused)


def refused_by_kubernetes(manifests: list[Manifest], version: str, folder: Path) -> str:
    validate = shutil.which("kubernetes-validate")
    if validate is None:
        pytest.skip("kubernetes-validate is not installed: what was rendered is known to be YAML alone")
    file = folder / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests), encoding="utf-8")
    command = [validate, "--strict", "--quiet", "--kubernetes-version", version, file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode == 0) == (done.stdout == ""), done.stdout + done.stderr
    return done.stdout


def test_a_cluster_older_than_the_chart_takes_is_refused() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["kubeVersion"] == ">=1.28.0-0"
    with pytest.raises(ValueError, match=r"1\.27\.0"):
        helm(*TEMPLATE, "--kube-version", "1.27.0", CHART, values=LEAST)


def test_the_readmes_own_words_render() -> None:
    """With the name that it says to give the gateway behind an ingress."""
    readme = text("README.md").replace('"$(swarm-node identity --home seed-home)"', PEER_ID).replace("\\\n", " ")
    [words] = re.findall(r"^helm install (\w+) deploy/helm/swarm (--set .*)$", readme, re.MULTILINE)
    [hosts] = re.findall(r"`(--set gateway\.hosts=\S+)`", readme)
    found = pods(manifests_of(helm("template", words[0], CHART, *words[1].split(), *hosts.split())))
    node = found["swarm-node"]
    assert node["containers"][0]["image"] == "registry.example.org/swarm-node:cpu"
    assert node["volumes"][-1]["persistentVolumeClaim"]["claimName"] == "models"
    assert config_of(node["containers"][0]["args"]).model == Path("/models/story")
    assert "swarm.example.org" in allowed_hosts(found["swarm-gateway"])


def allowed_hosts(pod: Manifest) -> tuple[str, ...]:
    """Return the allowed hosts as the program reads them."""
    return configured(pod).allowed_hosts


def configured(pod: Manifest) -> Config:
    [container] = pod["containers"]
    environment = {entry["name"]: str(entry.get("value", "x")) for entry in container["env"]}
    return config_of(container["args"], environment)


def test_the_gateway_believes_the_proxies_given() -> None:
    assert configured(pods(render(LEAST))["demo-gateway"]).trusted_proxies == ()
    assert configured(pods(render(MOST))["demo-gateway"]).trusted_proxies == ("10.42.0.0/16", "::1/128")


def test_the_gateway_answers_to_its_service_and_to_the_names_given() -> None:
    service = "demo-gateway.prod"
    own = (service, f"{service}.svc", f"{service}.svc.cluster.local")
    assert allowed_hosts(pods(render(LEAST))["demo-gateway"]) == own
    assert allowed_hosts(pods(render(MOST))["demo-gateway"]) == (*own, "swarm.example.org", "*.example.net")


def test_a_pod_is_waited_for_asked_and_drained() -> None:
    """Its start may take ten minutes, in which liveness is not asked; a drain has the time that was given."""
    for pod in pods(render(MOST)).values():
        [container] = pod["containers"]
        status = {"command": ["swarm-node", "status", "--json"]}
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
        assert [probe["exec"] for probe in probes.values()] == [status] * 3
        assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == 600
        assert container["lifecycle"] == {"preStop": {"exec": {"command": ["swarm-node", "drain"]}}}
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment["SWARM_DRAIN_S"] == "120"
        assert pod["terminationGracePeriodSeconds"] == 150
