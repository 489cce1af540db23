"""Every command, flag and setting that deploy/ names is one of the program's, with a value that it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.deploy_commands import DEPLOY, PEER_ID, ROOT, config_of, shell_commands, text
from swarm_node.settings.config import SETTINGS
from swarm_protocol.errors import SwarmError
from typer.exceptions import TyperException

README = text("README.md")
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL))
PROSE = "\n".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL)))
COMMANDS = sorted({tuple(words) for part in (SHELL, PROSE) for words in shell_commands(part)})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_readme_command_exists(words: tuple[str, ...]) -> None:
    config_of(words)


def test_readme_shows_a_command_for_each_kind_of_daemon() -> None:
    assert {words[0] for words in COMMANDS} >= {"join", "identity", "status", "drain", "doctor"}


def test_a_command_or_flag_that_the_program_does_not_have_is_noticed() -> None:
    """The tests here would pass over everything if their reading found nothing."""
    for wrong in (["jion"], ["join", "--seeds", "x"], ["seed", "--listen", "4001"], ["gateway", "--port", "web"]):
        with pytest.raises((AssertionError, SwarmError, TyperException)):
            config_of(wrong)
    assert list(shell_commands('x="$(swarm-node identity --home a)" # swarm-node@no')) == [["identity", "--home", "a"]]


def test_readme_links_and_named_files_exist() -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", README)]
    assert [link for link in links if not (DEPLOY / link).exists()] == []
    named = re.findall(r"(?<![\w/.])deploy/[\w@./-]+", SHELL)
    assert [path for path in named if not (ROOT / path).exists()] == []
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)", README, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors


def test_readme_never_shows_a_real_host() -> None:
    hosts = set(re.findall(r"https?://([\w.-]+)", README)) | set(re.findall(r"/dns4/([\w.-]+)", README))
    outside = {host for host in hosts if not host.endswith("example.org")}
    assert outside == {"127.0.0.1", "download.pytorch.org"}


@pytest.mark.parametrize("name", ["public-seed", "systemd/swarm-node@.service"])
def test_commands_in_scripts_and_units_are_the_programs(name: str) -> None:
    script = text(name).replace("as_swarm ", "swarm-node ").replace("%i", "seed").replace("$@", "status")
    script = script.replace("$domain", "seed.example.org").replace("$peer_id", PEER_ID)
    commands = list(shell_commands("\n".join(line for line in script.splitlines() if line[:1] != "#")))
    assert commands
    for words in commands:
        config_of(words)


def test_image_asks_and_starts_what_the_program_has() -> None:
    dockerfile = text("Dockerfile")
    arrays = [json.loads(found) for found in re.findall(r'(?:CMD|ENTRYPOINT) (\[.*"swarm-node".*\])', dockerfile)]
    health, entrypoint = arrays
    config_of(health[1:])
    assert entrypoint == ["tini", "--", "swarm-node"]


def test_every_variable_named_is_a_setting() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    found = {name: path for path in files for name in re.findall(r"\bSWARM_[A-Z_]+[A-Z]", path.read_text("utf-8"))}
    # the one that Kubernetes would set is named to say why it must not
    known = {"SWARM_CONFIG", "SWARM_SEED_SERVICE_HOST", *("SWARM_" + name.upper() for name in SETTINGS)}
    assert {name: Path(path).name for name, path in found.items() if name not in known} == {}
    assert len(found) > 6
