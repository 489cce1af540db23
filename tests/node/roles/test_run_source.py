"""A run's file in a home: it is kept once, and used only while it is the run that its folder names."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import sign_run
from swarm_node.roles.run_source import copy_path, keep_copy, kept_copy
from swarm_node.settings.parsers import RunId, parse_run
from swarm_node.storage.home import Home
from swarm_protocol.identity import Identity

RUN = sign_run(RunConfig(name="kept"), Identity(bytes(32)), issued_at=1_700_000_000)


def test_copy_is_the_run_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert kept_copy(home, RUN.run_id) is None
    keep_copy(home, RUN)
    assert kept_copy(home, RUN.run_id) == RUN
    path = copy_path(home, RUN.run_id)
    assert [each.name for each in path.parent.iterdir()] == ["run.toml"]
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    assert kept_copy(home, RUN.run_id) is None
    other = sign_run(RunConfig(name="kept"), Identity(bytes(32)), issued_at=1_700_000_001)
    path.write_text(other.text)
    assert kept_copy(home, RUN.run_id) is None


def test_a_run_is_named_by_its_id_unless_there_is_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_run(RUN.run_id) == RunId(RUN.run_id)
    assert parse_run("run.toml") == tmp_path / "run.toml"
    assert parse_run(f"./{RUN.run_id}") == tmp_path / RUN.run_id
    Path(RUN.run_id).touch()
    assert parse_run(RUN.run_id) == tmp_path / RUN.run_id
