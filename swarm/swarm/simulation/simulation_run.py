"""Runs a scenario and returns its report, in one process or in several whose virtual clocks advance together."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from swarm_protocol.checks import unchecked
from swarm_protocol.wire import handing_over

from swarm.simulation.distant_hosts import Division, ProcessEnded, num_processes
from swarm.simulation.message_sizes import SIZES, UNCHECKED
from swarm.simulation.report import Measurements, Report, report_of
from swarm.simulation.scenario import Scenario
from swarm.simulation.world import World
from swarm.testing import virtual_time

OnMinute = Callable[[float, int], None]

END_S = 60.0
"""Seconds that other processes have to end after the first one has."""

FAILURE_S = 1.0
"""Seconds that a process that has failed has to send its error."""


def simulate(
    scenario: Scenario,
    *,
    processes: int = 1,
    on_minute: OnMinute = lambda _minute, _nodes: None,
    real_limit_s: float = 86400.0,
) -> Report:
    """Run a scenario in virtual time and return its report.

    `on_minute` is called after each simulated minute, including those of the warm-up, with that minute and the number
    of nodes. `processes` is the number of processes, 0 for the default of `num_processes`. The report depends a little
    on it (see `distant_hosts`).

    Raises `virtual_time.RealTimeout` after `real_limit_s` of real time, and what a process of the simulation raised.
    """
    number = num_processes(scenario, processes)
    if number == 1:
        return report_of(scenario, _run_part(Division(scenario), {}, on_minute, real_limit_s))
    with _others(scenario, number, real_limit_s) as (pipes, outcomes):
        try:
            measured = _run_part(Division(scenario, number), pipes, on_minute, real_limit_s)
        except ProcessEnded as error:
            raise _failure_of(outcomes) or error from None
        for outcome in outcomes:
            measured.add(_measured_by(outcome))
    return report_of(scenario, measured, number)


def _run_part(
    division: Division, pipes: Mapping[int, Connection], on_minute: OnMinute, real_limit_s: float
) -> Measurements:
    """Simulate the nodes of this process."""
    thresholds = gc.get_threshold()
    # by default the garbage collector would go through millions of lasting objects so often that it took half the time
    gc.set_threshold(1_000_000, 20, 1000)
    try:
        with handing_over(SIZES), unchecked(UNCHECKED):
            world = World(division.scenario, on_minute, division=division, pipes=pipes)
            return virtual_time.run(world.run(), real_timeout_s=real_limit_s, watch_tasks=False)
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def _others(
    scenario: Scenario, number: int, real_limit_s: float
) -> Iterator[tuple[Mapping[int, Connection], list[Connection]]]:
    """Run the other processes of a simulation. Yield the pipes to them, by index, and the pipes that bring their
    measurements or errors."""
    context = multiprocessing.get_context("spawn")
    pipes: list[dict[int, Connection]] = [{} for _ in range(number)]
    for one in range(number):
        for other in range(one + 1, number):
            pipes[one][other], pipes[other][one] = context.Pipe()
    outcomes, running = list[Connection](), list[SpawnProcess]()
    wait_s = 0.0  # if this process fails or is interrupted, the others are killed at once
    try:
        for index in range(1, number):
            outcome, told = context.Pipe(duplex=False)
            arguments = Division(scenario, number, index), pipes[index], told, real_limit_s
            process = context.Process(target=_run_beside, args=arguments, daemon=True)
            with _no_interrupt():
                process.start()
                running.append(process)
            told.close()
            for pipe in pipes[index].values():
                pipe.close()  # so that the others notice the end of that process
            outcomes.append(outcome)
        yield pipes[0], outcomes
        wait_s = END_S
    finally:
        for pipe in pipes[0].values():
            pipe.close()
        for process in running:
            process.join(wait_s)
            process.kill()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Delay Ctrl-C in this process, and block it for good in processes started meanwhile. A terminal interrupts all
    processes, and these would print tracebacks during their imports. They end with this process anyway."""
    resource_tracker.ensure_running()  # otherwise it is started below, and then it unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_beside(division: Division, pipes: Mapping[int, Connection], outcome: Connection, real_limit_s: float) -> None:
    """Run in another process: simulate its nodes, and send the measurements or the error."""
    found: Measurements | Exception
    try:
        found = _run_part(division, pipes, lambda _minute, _nodes: None, real_limit_s)
    except Exception as error:
        error.add_note(f"in process {division.index} of the simulation:\n{traceback.format_exc()}")
        found = error
    for pipe in pipes.values():
        pipe.close()
    with contextlib.suppress(OSError):
        outcome.send(found)


def _measured_by(outcome: Connection) -> Measurements:
    """Return the measurements of another process. Raises the error that it has sent."""
    try:
        found = outcome.recv()
    except EOFError:
        raise ProcessEnded.unexplained() from None
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Measurements)
    return found


def _failure_of(outcomes: list[Connection]) -> Exception | None:
    """Return the error that another process has sent, if any. An error other than ProcessEnded comes first, because
    it is the cause of the others."""
    failures = []
    for outcome in outcomes:
        if outcome.poll(FAILURE_S):
            with contextlib.suppress(EOFError):
                found = outcome.recv()
                if isinstance(found, Exception):
                    failures.append(found)
    return min(failures, key=lambda each: isinstance(each, ProcessEnded), default=None)
