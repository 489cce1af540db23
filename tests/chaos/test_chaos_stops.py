"""SIGSTOP of a member for 15 s, at every phase of a round: real processes, real libp2p.

.venv/bin/python -m pytest tests/chaos/test_chaos_stops.py -m chaos -s
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop
from bench.report import Report
from chaos.stops import stop_members
from support.training_swarm import PHASES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

STOPPED_S = 15.0
MOST_S = 10.0


def test_run_goes_on_within_seconds_after_any_member_is_stopped_at_any_phase(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stops = runner.run(stop_members(tmp_path, PHASES, num_members=5, stopped_s=STOPPED_S))
    report = Report(f"one of 5 members stopped for {STOPPED_S:.0f} s")
    for stop in stops:
        report.row(
            stop.phase, longest_step_s=stop.longest_s, steps_meanwhile=stop.num_steps_meanwhile, back_s=stop.back_s
        )
    report.show()
    assert max(stop.longest_s for stop in stops) < MOST_S
