"""The directory of the demo, and the options that it refuses."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from swarm_node import cli
from swarm_node.demo import command
from swarm_protocol.errors import ConfigError


def _console() -> Console:
    return Console(file=io.StringIO())


def test_home_is_deleted_after_success_and_interruption() -> None:
    with command.home_root(None, _console()) as root:
        assert root.is_dir()
    assert not root.exists()
    with pytest.raises(KeyboardInterrupt), command.home_root(None, _console()) as root:
        raise KeyboardInterrupt
    assert not root.exists()


def test_home_is_kept_after_a_failure_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    console = _console()
    with pytest.raises(RuntimeError), command.home_root(None, console) as root:
        raise RuntimeError
    assert root.is_dir()
    assert isinstance(console.file, io.StringIO)
    assert str(root) in console.file.getvalue().replace("\n", "")


def test_home_is_kept_in_the_given_directory(tmp_path: Path) -> None:
    with command.home_root(tmp_path / "a" / "b", _console()) as root:
        pass
    assert root == tmp_path / "a" / "b"
    assert root.is_dir()


def test_home_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ConfigError, match="not an empty directory"), command.home_root(tmp_path, _console()):
        pass
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("option", "value", "range_of"),
    [
        ("nodes", "1", "2 to 16"),
        ("nodes", "17", "2 to 16"),
        ("outer-steps", "0", "1 to 1000"),
        ("interval-steps", "0", "1 to 1000"),
        ("temperature", "3", "0 to 2"),
    ],
)
def test_impossible_demo_is_refused_before_anything_starts(
    option: str, value: str, range_of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["demo", f"--{option}", value]) == cli.EXIT_USAGE
    assert re.search(f"--{option}: '{value}' is not a (whole )?number from {range_of}\n", capsys.readouterr().err)
