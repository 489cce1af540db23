"""What `join` asks of torch's threads, which is read when torch is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from swarm_node.command_options import Flags
from swarm_node.commands import daemons


@pytest.mark.parametrize(("asked", "expected"), [(None, "passive"), ("active", "active")])
def test_join_that_serves_has_threads_sleep_between_steps_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", asked or "")
    if asked is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(daemons, "live", lambda *_arguments, **_options: 0)
    (tmp_path / "config.json").write_text("{}")
    flags = Flags(values={"home": str(tmp_path / "home"), "model": str(tmp_path)}, json=False, file=None, extra={})
    assert daemons.join(flags) == 0
    assert os.environ["OMP_WAIT_POLICY"] == expected


def test_join_that_does_not_serve_leaves_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(daemons, "live", lambda *_arguments, **_options: 0)
    assert daemons.join(Flags(values={"home": str(tmp_path / "home")}, json=False, file=None, extra={})) == 0
    assert "OMP_WAIT_POLICY" not in os.environ
