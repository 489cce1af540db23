"""`swarm-node run watch` beside a real node that trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm.training.run_config import DEFAULT_MODEL, RunConfig
from swarm.training.run_file import load_run, write_run
from swarm_protocol.identity import Identity

from .conftest import Seed, StartNode, run_node

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.timeout(240)
def test_watch_shows_the_last_step_of_a_run_whose_member_is_still_there(
    seed: Seed, start_node: StartNode, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    run = RunConfig(name="tiny", outer_steps=2, interval_steps=2, min_group=1, model=dict(DEFAULT_MODEL) | SMALL)
    write_run(path, run, Identity.generate())
    where = ("--network-id", "tests", "--peers", seed.addr)
    work = ("--run", path, "--then-serve", "--micro-batch", "2")
    node = start_node("join", *where, "--probe", "off", "--device", "cpu", "--threads", "1", *work, home="a")
    finished = node.wait_for("run_finished", timeout_s=150)
    watched = run_node("run", "watch", path, *where)
    assert watched.code == 0
    assert [event["event"] for event in watched.events] == ["watching", "members", "committed", "run_finished"]
    assert (watched.events[2]["step"], watched.events[2]["digest"]) == (2, finished["digest"])
    assert watched.events[0]["run"] == load_run(path).run_id
    assert watched.events[-1]["digest"] == finished["digest"]
