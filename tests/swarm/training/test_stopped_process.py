"""Tests a run in which a real process is stopped by SIGSTOP while it coordinates: its connections stay open, and it is
silent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop
from chaos.stops import stop_members


def test_run_goes_on_without_a_stopped_coordinator_and_takes_it_back(tmp_path: Path) -> None:
    def longest_s(folder: Path) -> float:
        folder.mkdir()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            (stop,) = runner.run(stop_members(folder, ["round.sign"], num_members=3, stopped_s=0.0))
        return stop.longest_s

    # steps should take 5 s, and longer on a busy machine only; full patience with a coordinator would be 15 s
    assert any(longest_s(tmp_path / name) < 12.0 for name in "abc")
