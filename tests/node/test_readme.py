"""The commands and snippets of the README, and of the guides that continue it, exist and work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from node.gateway.scripted_client import ScriptedClient
from starlette.testclient import TestClient
from support.dashboard_swarms import example_source
from support.deploy_commands import PEER_ID, config_of, shell_commands
from swarm.training.run.run_file import load_checked_run
from swarm_node import cli, network_snapshot
from swarm_node.dashboard import app as dashboard_app
from swarm_node.dashboard import live
from swarm_node.dashboard.app import combined, create_dashboard
from swarm_node.dashboard.history.retention import RetentionLimits
from swarm_node.formatting import DAY_S
from swarm_node.gateway.app import create_app
from swarm_node.metrics import exporter
from swarm_node.settings.config import SETTINGS

import swarm

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_readme_is_short() -> None:
    assert len(README.split()) <= 900


def test_readme_figures_equal_the_measurements_which_name_their_benches() -> None:
    measurements = (ROOT / "docs" / "explanation" / "measurements.md").read_text(encoding="utf-8")
    _, _, table = README.partition("## What is measured")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", table.partition("## What is missing")[0], flags=re.MULTILINE)
    figures = {figure for _, *cells in rows for cell in cells for figure in re.findall(r"(?<![\w.])\d[\d.]*", cell)}
    assert len(figures) >= 14
    assert {each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?!\d)", measurements)} == set()
    benches = re.findall(r"`(tests/[\w/]+\.py)`", measurements)
    assert {each for each in benches if not (ROOT / each).is_file()} == set()


WRITTEN = README.replace("ADDR", f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER_ID}").replace("MODEL", "OWNER/NAME")
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", WRITTEN, flags=re.DOTALL))
PROSE = "\n".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", WRITTEN, flags=re.DOTALL)))
COMMANDS = sorted({tuple(words) for part in (SHELL, PROSE) for words in shell_commands(part)})
CURLS = re.findall(r"^curl http://127\.0\.0\.1:(\d+)(\S+)", SHELL, flags=re.MULTILINE)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_readme_command_exists(words: tuple[str, ...]) -> None:
    config_of(words)


def test_readme_shows_every_kind_of_user_a_command() -> None:
    users = {"seed", "join", "gateway", "dashboard", "top", "status", "doctor", "plan", "identity", "drain", "chat"}
    assert {words[0] for words in COMMANDS} >= users
    assert {words[1] for words in COMMANDS if words[0] == "run"} == {"init", "sign", "show", "watch", "export"}


def test_readme_flags_in_its_prose_exist() -> None:
    known = {f"--{name.replace('_', '-')}" for name in SETTINGS} | {
        spec.split()[0] for command in cli.COMMANDS for spec in command.options
    }
    known |= {f"--no-{flag[2:]}" for flag in known} | {"--help", "--json", "--keep", "--install-completion"}
    told = {flag for words in PROSE.splitlines() for flag in re.findall(r"(?<![\w-])--[a-z-]+", words)}
    assert told <= known
    assert "--compile" in told, "the test has to find options in the prose"


def test_readme_command_for_shell_completion_exists(capsys: pytest.CaptureFixture[str]) -> None:
    [flag] = re.findall(r"`swarm-node (--install\S+)`", (ROOT / "docs/guides/observe.md").read_text(encoding="utf-8"))
    assert cli.run(["--help"]) == 0
    assert f"{flag} " in capsys.readouterr().out


@pytest.mark.parametrize(("port", "path"), CURLS)
def test_readme_curl_uses_a_port_that_a_command_opens_and_an_existing_path(port: str, path: str) -> None:
    configs = [config_of(words) for words in COMMANDS if words[0] in {"gateway", "dashboard", "join"}]
    assert int(port) in {config.port for config in configs} | {
        config.metrics.port for config in configs if config.metrics
    }
    gateway = create_app(ScriptedClient())
    answer = TestClient(combined(gateway, create_dashboard(example_source(3)))).get(path)
    assert answer.status_code == 200


def test_readme_pictures_exist_and_have_descriptions() -> None:
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", README)
    assert {Path(path).stem for _, path in pictures} == {"architecture", "overview"}
    assert [path for words, path in pictures if len(words) < 60 or not (ROOT / path).is_file()] == []


def test_security_names_the_bounds_of_dashboard_and_metrics() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for said in (
        f"{dashboard_app.REQUESTS_PER_MIN} requests a minute",
        f"{live.MAX_STREAMS_EACH} streams for an address",
        f"{live.MAX_STREAMS} streams in all",
        f"{live.MAX_STREAM_S / 60:.0f} minutes each",
        f"{network_snapshot.MAX_MODELS} models and {network_snapshot.MAX_RUNS} runs",
        f"at most {exporter.MAX_CONNECTIONS} connections",
        f"the last {RetentionLimits().max_age_s / DAY_S:.0f} days",
    ):
        assert said in text.replace("\n", " ")


def test_readme_run_commands_create_a_run_that_can_be_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    [block] = [block for block in code_blocks("sh") if "run init" in block]
    offline = [line.split("#")[0].split()[1:] for line in block.splitlines() if "--peers" not in line]
    assert [cli.run(arguments) for arguments in offline] == [0, 0, 0, 0]
    assert load_checked_run(tmp_path / "run.toml").config.data.digest


def test_own_module_snippets_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first snippet makes the run. The second one trains it, here with one member, with the options of the third
    one and the optimizer of the fourth."""
    author, member, kept, schedule = code_blocks("python", "docs/guides/own-module.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    alone = author.replace("interval_steps=20", "interval_steps=20, min_group=1")
    exec(compile(alone, "own-module.md", "exec"), {})
    assert load_checked_run(tmp_path / "own.toml").config.name == "own"
    told: list[tuple[object, ...]] = []
    names = {"print": lambda *line: told.append(line)}
    own = re.sub(r"optimizer=lambda .*,", "optimizer=optimizer, options=options,", member.replace('"ADDR"', ""))
    exec(compile("\n".join((f"import torch\n{schedule}", kept, own)), "own-module.md", "exec"), names)
    assert any((tmp_path / "checkpoints").iterdir())
    assert [line[0] for line in told] == list(range(1, 11))
    assert told[-1][1] < told[0][1]  # type: ignore[operator]


def test_readme_client_snippet_uses_what_the_sdk_has() -> None:
    [snippet] = [block for block in code_blocks("python") if "client.generate" in block]
    compile(snippet, "README.md", "exec")
    methods = set(re.findall(r"client\.(\w+)\(", snippet))
    assert methods == {"models", "generate", "trace"}
    assert [name for name in methods if not callable(getattr(swarm.Client, name, None))] == []


def leads_somewhere(link: str) -> bool:
    path, _, heading = link.partition("#")
    if not heading:
        return (ROOT / path).exists()
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text("utf-8"), re.M)
    return heading in {each.lower().replace(" ", "-") for each in headings}


def test_readme_links_and_make_targets_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert [link for link in links if not leads_somewhere(link)] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"(?:`|^)make (\w+)", README, re.M) if f"\n{name}:" not in makefile] == []
