"""The compose file: a swarm that finds itself, whose daemons are confined and reach nobody beyond the machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_commands import DEPLOY, config_of, text
from swarm_node import daemon
from swarm_node.config import Config, resolve
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
    given = {key: value for key, value in service["environment"].items() if key != "SWARM_CONFIG"}
    environment = {key: filled_in(value) for key, value in given.items()}
    config = config_of([filled_in(word) for word in service["command"]], environment)
    assert config.name == name
    assert any("0.0.0.0" in listened for listened in (*config.listen, config.host))


def test_identity_writes_the_seeds_address_for_all_and_keeps_its_key(tmp_path: Path) -> None:
    home, settings = tmp_path / "home", tmp_path / "network.toml"
    command = SERVICES["identity"]["command"][0].replace("$$", "$").replace("/etc/swarm/network.toml", str(settings))
    environment = {"SWARM_HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    told = []
    for _ in range(2):
        subprocess.run([*SERVICES["identity"]["entrypoint"], command], env=environment, check=True, timeout=60)
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
    needed_s = Config.__dataclass_fields__["drain_s"].default + 2 * daemon.CLOSE_S
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


def test_compose_itself_takes_the_file(tmp_path: Path) -> None:
    plugin = shutil.which("docker")
    found = plugin and subprocess.run([plugin, "compose", "version"], capture_output=True, check=False).returncode == 0
    if not found:
        pytest.skip("docker's compose plugin is not installed: the file was read as YAML alone")
    command = [plugin, "compose", "--file", DEPLOY / "compose.yaml", "config", "--quiet"]
    done = subprocess.run(
        command, env={**os.environ, "MODEL": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
