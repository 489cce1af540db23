"""Tests of simulations in two processes: the report is nearly that of one process, and a failure is one error."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from typing import Any

import pytest
from swarm.simulation import simulation_run
from swarm.simulation.distant_hosts import Division, ProcessEnded
from swarm.simulation.scenario import Churn, Nat, Region, Scenario
from swarm.simulation.simulated_host import Links
from swarm.simulation.simulation_run import simulate
from swarm.simulation.world import World
from swarm.testing import virtual_time
from swarm_protocol.errors import SwarmError

SCENARIO = Scenario(
    nodes=24,
    minutes=1.5,
    warm_up_minutes=2,
    churn=Churn(model="half-life", half_life_minutes=4),
    regions=(Region(name="near", latency_ms=200), Region(name="far", latency_ms=250)),
    nats=(Nat(share=0.5), Nat(kind="relayed", share=0.5)),
)


def test_two_processes_report_nearly_what_one_does_and_the_same_each_time() -> None:
    whole, halves = simulate(SCENARIO), simulate(SCENARIO, processes=2)
    assert simulate(SCENARIO, processes=2).to_json() == halves.to_json()
    assert halves.sections["Nodes"] == whole.sections["Nodes"]
    assert [each["nodes"] for each in halves.samples] == [each["nodes"] for each in whole.samples]
    one, two = (dict[str, Any](report.sections["A node's state and traffic"]) for report in (whole, halves))
    for name in ("messages sent a minute", "bytes sent a minute"):
        assert two[name]["median"] == pytest.approx(one[name]["median"], rel=0.2)
    for name in ("records held, mean", "routing table, mean"):
        assert two[name] == pytest.approx(one[name], rel=0.1)
    lookups: dict[str, Any] = dict(halves.sections["Lookups"])
    assert lookups["lookups"] > 40
    assert lookups["share that found the record"] > 0.9
    assert (whole.scenario["processes"], halves.scenario["processes"]) == (1, 2)


def test_other_process_ignores_ctrl_c_even_during_its_imports_and_ends_with_the_first_one() -> None:
    before = set(multiprocessing.active_children())  # of another test, in whose fixture one goes on
    with contextlib.suppress(KeyboardInterrupt), simulation_run._others(SCENARIO, 2, 60.0):
        [process] = set(multiprocessing.active_children()) - before
        for _ in range(4):
            os.kill(process.pid or 0, signal.SIGINT)
            process.join(0.05)
        assert process.exitcode is None
        raise KeyboardInterrupt
    process.join(10.0)
    assert process.exitcode == -signal.SIGKILL


def test_process_sends_process_ended_if_another_one_has_ended() -> None:
    pipe, far_end = multiprocessing.Pipe()
    outcome, told = multiprocessing.Pipe(duplex=False)
    far_end.close()
    simulation_run._run_beside(Division(SCENARIO, 2, 1), {0: pipe}, told, 60.0)
    with pytest.raises(SwarmError, match="another process of this simulation has ended"):
        simulation_run._measured_by(outcome)


def test_world_ends_with_the_window_in_which_another_process_has_ended() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(ProcessEnded):
            await World(SCENARIO, lambda _minute, _nodes: None, division=Division(SCENARIO, 2), pipes={1: pipe}).run()
        return loop.time() - began_s

    pipe, far_end = multiprocessing.Pipe()
    far_end.close()
    assert virtual_time.run(main()) == pytest.approx(Links(SCENARIO).least_latency_s)


def test_process_that_ends_without_an_outcome_raises_process_ended() -> None:
    outcome, told = multiprocessing.Pipe(duplex=False)
    told.close()
    with pytest.raises(SwarmError, match="another process of this simulation has ended"):
        simulation_run._measured_by(outcome)
    assert simulation_run._failure_of([outcome]) is None


def test_failure_that_ended_the_other_processes_is_returned_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("it failed there")

    monkeypatch.setattr(simulation_run.signal, "signal", lambda *_: signal.SIG_DFL)
    monkeypatch.setattr(simulation_run, "_run_part", fails)
    (first, told_first), (second, told_second) = (multiprocessing.Pipe(duplex=False) for _ in "12")
    told_first.send(ProcessEnded.unexplained())  # as the second process has ended
    simulation_run._run_beside(Division(SCENARIO, 3, 2), {}, told_second, 60.0)
    failure = simulation_run._failure_of([first, second])
    assert str(failure) == "it failed there"
    (note,) = failure.__notes__
    assert "in process 2 of the simulation" in note
    assert "in fails" in note
