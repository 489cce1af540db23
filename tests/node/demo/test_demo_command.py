"""The directory of the demo, and the options that it refuses."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from swarm_node.demo import command
from swarm_protocol.errors import ConfigError


def _console() -> Console:
    return Console(file=io.StringIO())


def test_home_is_gone_after_success_and_interruption() -> None:
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


def test_home_is_kept_where_it_was_asked_to_be(tmp_path: Path) -> None:
    with command.home_root(tmp_path / "a" / "b", _console()) as root:
        pass
    assert root == tmp_path / "a" / "b"
    assert root.is_dir()


def test_home_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ConfigError, match="not an empty directory"), command.home_root(tmp_path, _console()):
        pass
    assert (tmp_path / "precious").exists()


def test_impossible_demo_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="1 nodes"):
        command.demo(nodes=1)
