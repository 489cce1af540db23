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


COMMANDS = sorted(set(re.findall(r"^swarm-node (\w+)([^#\n]*)", "\n".join(code_blocks("sh")), flags=re.MULTILINE)))


@pytest.mark.parametrize(("command", "arguments"), COMMANDS)
def test_readme_command_has_the_flags_it_is_shown_with(
    command: str, arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert [flag for flag in re.findall(r"--[a-z-]+", arguments) if f"{flag} " not in text] == []


def test_readme_shows_every_kind_of_user_a_command() -> None:
    assert {command for command, _ in COMMANDS} >= {"seed", "join", "gateway", "status", "doctor"}


def test_readme_researcher_snippet_writes_a_run_that_can_be_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [snippet] = [block for block in code_blocks("python") if "write_run" in block]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    exec(compile(snippet, "README.md", "exec"), {})
    assert load_run(tmp_path / "run.toml").config.name == "my-run"


def test_readme_client_snippet_uses_what_the_sdk_has() -> None:
    [snippet] = [block for block in code_blocks("python") if "generate" in block]
    compile(snippet, "README.md", "exec")
    methods = set(re.findall(r"client\.(\w+)\(", snippet))
    assert methods == {"models", "generate", "trace"}
    assert [name for name in methods if not callable(getattr(swarm.Client, name, None))] == []


def test_readme_links_and_make_targets_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"(?:`|^)make (\w+)", README, re.M) if f"\n{name}:" not in makefile] == []
