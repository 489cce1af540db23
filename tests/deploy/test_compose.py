"""The compose file: a swarm that finds itself, whose daemons are confined and reach nobody beyond the machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deploy_commands import DEPLOY, ROOT, config_of, text
from support.node_settings import resolve
from swarm_node import daemon
from swarm_node.settings.config import Config
from swarm_protocol.identity import Identity

COMPOSE: dict[str, Any] = yaml.safe_load(text("compose.yaml"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DAEMONS = {"seed", "gateway", "node-1", "node-2", "node-3"}


def filled_in(word: str) -> str:
    """`word` with each variable as it is without a value from outside."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)


def test_the_services_are_a_whole_swarm() -> None:
    assert set(SERVICES) == DAEMONS | {"identity", "prometheus", "grafana"}


@pytest.mark.parametrize("name", sorted(DAEMONS))
def test_daemon_is_started_with_what_the_program_has(name: str) -> None:
    service = SERVICES[name]
    environment = {key: filled_in(value) for key, value in without_file(service["environment"]).items()}
    config = config_of([filled_in(word) for word in service["command"]], environment)
    assert config.name == name
    assert any("0.0.0.0" in listened for listened in (*config.listen, config.host))


def test_identity_writes_the_seeds_address_for_all_and_keeps_its_key(tmp_path: Path) -> None:
    home, settings = tmp_path / "home", tmp_path / "network.toml"
    command = SERVICES["identity"]["command"][0].replace("$$", "$").replace("/etc/swarm/network.toml", str(settings))
    environment = {"SWARM_HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    told = []
    for _ in range(2):
        subprocess.run([*SERVICES["identity"]["entrypoint"], command], env=environment, check=True, timeout=120)
        told.append(settings.read_text())
    peer_id = Identity.load(home / "identity.key").peer_id
    assert resolve({"home": str(home)}, env={}, file=settings).peers == (f"/dns4/seed/tcp/4001/p2p/{peer_id}",)
    assert told[0] == told[1]


def test_members_wait_for_a_seed_that_lives_and_the_seed_for_its_key() -> None:
    assert SERVICES["seed"]["depends_on"] == {"identity": {"condition": "service_completed_successfully"}}
    members = DAEMONS - {"seed"}
    assert [SERVICES[name]["depends_on"] for name in members] == [{"seed": {"condition": "service_healthy"}}] * 4
    for name in members:
        assert SERVICES[name]["environment"]["SWARM_CONFIG"] == "/etc/swarm/network.toml"
        assert "network:/etc/swarm:ro" in SERVICES[name]["volumes"]


def test_only_the_seed_and_its_maker_see_its_key() -> None:
    assert {name for name, service in SERVICES.items() if "seed:/var/lib/swarm" in service["volumes"]} == {
        "seed",
        "identity",
    }
    homes = [volume for name in DAEMONS for volume in SERVICES[name]["volumes"] if volume.endswith(":/var/lib/swarm")]
    assert len(set(homes)) == len(DAEMONS)


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_every_service_that_stays_says_how_it_is() -> None:
    staying = {name: service["healthcheck"] for name, service in SERVICES.items() if name != "identity"}
    assert [name for name, check in staying.items() if not check.get("test")] == []
    for name in DAEMONS:
        assert staying[name]["test"][0] == "CMD"
        config_of(staying[name]["test"][2:])


def test_every_container_is_confined() -> None:
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert [name for name in DAEMONS if not SERVICES[name]["read_only"]] == []


def test_a_stop_leaves_time_to_drain() -> None:
    needed_s = Config.model_fields["drain_s"].default + 2 * daemon.CLOSE_S
    assert {int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > needed_s for name in DAEMONS} == {True}


def test_what_is_mounted_exists() -> None:
    volumes = [volume for service in SERVICES.values() for volume in service["volumes"]]
    sources = {volume.split(":")[0] for volume in volumes if not volume.startswith("${")}
    folders = {source for source in sources if source.startswith("./")}
    assert sources - folders == set(COMPOSE["volumes"])
    assert [folder for folder in folders if not (DEPLOY / folder).is_dir()] == []
    assert {name for service in SERVICES.values() for name in service["networks"]} == set(COMPOSE["networks"])


def test_prometheus_asks_the_services_that_there_are() -> None:
    """At the port that all of them show their numbers at."""
    [port] = {SERVICES[name]["environment"]["SWARM_METRICS"].rpartition(":")[2] for name in DAEMONS}
    scraped = (DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8")
    assert {name for name in DAEMONS if not re.search(rf"\b{name}:{port}\b", scraped)} == set()


def compose_program() -> list[str]:
    """The plugin, or the same as a program of its own; the first major version was another, for another format."""
    for program in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(program[0]):
            done = subprocess.run([*program, "version", "--short"], capture_output=True, text=True, check=False)
            if done.returncode == 0 and not done.stdout.startswith("1."):
                return program
    pytest.skip("docker's compose is not installed: the file was read as YAML alone")


def compose(file: Path = DEPLOY / "compose.yaml", **environment: str) -> subprocess.CompletedProcess[str]:
    """`docker compose config` with these variables alone: what there would be, as JSON."""
    command = [*compose_program(), "--file", str(file), "config", "--format", "json"]
    given = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(command, env=given | environment, capture_output=True, text=True, check=False, timeout=120)


def test_compose_takes_the_file_and_gives_every_node_the_model(tmp_path: Path) -> None:
    done = compose(MODEL=str(tmp_path), MODEL_NAME="story", NODE_MEMORY="2GiB", SWARM_ALLOWED_HOSTS="swarm.example.org")
    assert (done.returncode, done.stderr) == (0, "")
    services = json.loads(done.stdout)["services"]
    assert set(services) == set(SERVICES)
    for name in ("node-1", "node-2", "node-3"):
        [model] = [mount for mount in services[name]["volumes"] if mount["type"] == "bind"]
        assert (model["source"], model["target"], model["read_only"]) == (str(tmp_path), "/models/story", True)
        config = config_of(services[name]["command"], without_file(services[name]["environment"]))
        assert (config.model, config.max_memory) == (Path("/models/story"), 2 << 30)
    gateway = services["gateway"]
    assert config_of(gateway["command"], without_file(gateway["environment"])).allowed_hosts == ("swarm.example.org",)


def test_compose_gives_every_daemon_the_image_that_there_is_and_no_way_in_from_outside(tmp_path: Path) -> None:
    done = compose(MODEL=str(tmp_path))
    services = json.loads(done.stdout)["services"]
    for name in DAEMONS:
        build = services[name]["build"]
        assert (Path(build["context"]), build["dockerfile"]) == (ROOT, "deploy/Dockerfile")
        assert f"AS {build['target']}\n" in text("Dockerfile")
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    mounts = [mount for service in services.values() for mount in service["volumes"]]
    assert [mount for mount in mounts if mount["type"] == "bind" and not Path(mount["source"]).is_dir()] == []


def test_compose_refuses_a_key_that_it_does_not_know(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(text("compose.yaml").replace("read_only:", "readonly:"), encoding="utf-8")
    assert "readonly" in compose(wrong, MODEL=str(tmp_path)).stderr


@pytest.mark.parametrize("environment", [{}, {"MODEL": ""}], ids=["missing", "empty"])
def test_compose_refuses_to_start_without_a_model(environment: dict[str, str]) -> None:
    """It is the one variable without a default."""
    assert set(re.findall(r"\$\{(\w+)(?!\w|:-)", text("compose.yaml"))) == {"MODEL"}
    done = compose(**environment)
    assert done.returncode != 0
    assert "MODEL is missing a value: name the directory of a Hugging Face model" in done.stderr


def without_file(environment: dict[str, str]) -> dict[str, str]:
    """Return those of a service's variables that need no file that `identity` writes first."""
    return {name: value for name, value in environment.items() if name != "SWARM_CONFIG"}
