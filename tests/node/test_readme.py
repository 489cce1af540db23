"""What the README tells people to type exists and works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from swarm.training.run_file import load_run
from swarm_node import cli

import swarm

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = sorted(
    set(re.findall(r"^swarm-node (run \w+|\w+)([^#\n]*)", "\n".join(code_blocks("sh")), flags=re.MULTILINE))
)


@pytest.mark.parametrize(("command", "arguments"), COMMANDS)
def test_readme_command_has_the_flags_it_is_shown_with(
    command: str, arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert [flag for flag in re.findall(r"--[a-z-]+", arguments) if f"{flag} " not in text] == []


def test_readme_shows_every_kind_of_user_a_command() -> None:
    assert {command for command, _ in COMMANDS} >= {"seed", "join", "gateway", "status", "doctor"}


def test_readme_run_commands_lead_from_nothing_to_a_run_that_can_be_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    [block] = [block for block in code_blocks("sh") if "run init" in block]
    offline = [line.split("#")[0].split()[1:] for line in block.splitlines() if "--peers" not in line]
    assert [cli.run(arguments) for arguments in offline] == [0, 0, 0, 0]
    assert load_run(tmp_path / "run.toml").config.data.digest


def test_readme_own_module_snippets_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One makes the run, the other one trains it: here alone, and from the first address on."""
    author, member = (block for block in code_blocks("python") if "own.toml" in block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    alone = author.replace("interval_steps=20", "interval_steps=20, min_group=1")
    exec(compile(alone, "README.md", "exec"), {})
    assert load_run(tmp_path / "own.toml").config.name == "own"
    told: list[tuple[object, ...]] = []
    exec(compile(member.replace('"ADDR"', ""), "README.md", "exec"), {"print": lambda *line: told.append(line)})
    assert [line[0] for line in told] == list(range(1, 11))
    assert told[-1][1] < told[0][1]  # type: ignore[operator]


def test_readme_client_snippet_uses_what_the_sdk_has() -> None:
    [snippet] = [block for block in code_blocks("python") if "client.generate" in block]
    compile(snippet, "README.md", "exec")
    methods = set(re.findall(r"client\.(\w+)\(", snippet))
    assert methods == {"models", "generate", "trace"}
    assert [name for name in methods if not callable(getattr(swarm.Client, name, None))] == []


def test_readme_links_and_make_targets_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"(?:`|^)make (\w+)", README, re.M) if f"\n{name}:" not in makefile] == []
