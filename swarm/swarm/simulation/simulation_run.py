"""Runs a scenario from its beginning to its report, in one process or in several whose virtual clocks move together."""

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
from swarm.simulation.handed_messages import SIZES, UNCHECKED
from swarm.simulation.report import Measurements, Report, report_of
from swarm.simulation.scenario import Scenario
from swarm.simulation.simulated_host import Links
from swarm.simulation.world import World
from swarm.testing import virtual_time

OnMinute = Callable[[float, int], None]

END_S = 60.0
"""Time in which other processes end after the first one."""

FAILURE_S = 1.0
"""Time in which a process that has failed says why."""


def simulate(
    scenario: Scenario,
    *,
    processes: int = 1,
    on_minute: OnMinute = lambda _minute, _nodes: None,
    real_limit_s: float = 86400.0,
) -> Report:
    """Run a scenario in virtual time. `on_minute` is told each simulated minute, those of the warm-up included, and the
    number of nodes then. `processes` share the work; 0: as many as suit the scenario and this machine. The report
    depends a little on their number, see `distant_hosts`.

    Raises `virtual_time.RealTimeout` after `real_limit_s` of real time.
    """
    number = processes_for(scenario, processes)
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


def processes_for(scenario: Scenario, asked_for: int = 0) -> int:
    """Return how many processes a simulation takes; 0: as many as suit the scenario and this machine."""
    return num_processes(scenario, asked_for, Links(scenario).least_latency_s)


def _run_part(
    division: Division, pipes: Mapping[int, Connection], on_minute: OnMinute, real_limit_s: float
) -> Measurements:
    """Simulate this process's nodes."""
    thresholds = gc.get_threshold()
    # millions of objects stay, and to look through them again and again takes as long as all else
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
    """Run the other processes of a simulation. Yield the pipes to each, and those over which their outcomes come."""
    context = multiprocessing.get_context("spawn")
    pipes: list[dict[int, Connection]] = [{} for _ in range(number)]
    for one in range(number):
        for other in range(one + 1, number):
            pipes[one][other], pipes[other][one] = context.Pipe()
    outcomes, running = list[Connection](), list[SpawnProcess]()
    patience_s = 0.0  # where this process fails, or is interrupted, the others have nothing more to do
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
                pipe.close()  # so that its end is noticed
            outcomes.append(outcome)
        yield pipes[0], outcomes
        patience_s = END_S
    finally:
        for pipe in pipes[0].values():
            pipe.close()
        for process in running:
            process.join(patience_s)
            process.kill()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Hold back Ctrl-C from this process, and for good from those that it starts meanwhile: a terminal interrupts all,
    and they would print tracebacks from the middle of their imports. They end with this process."""
    resource_tracker.ensure_running()  # here, since it lets signals through again once it has started its own process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_beside(division: Division, pipes: Mapping[int, Connection], outcome: Connection, real_limit_s: float) -> None:
    """Simulate the nodes of another process than the caller's."""
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
    """Return what another process has measured. Raises what it has raised."""
    try:
        found = outcome.recv()
    except EOFError:
        raise ProcessEnded.without_a_word() from None
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Measurements)
    return found


def _failure_of(outcomes: list[Connection]) -> Exception | None:
    """Return what another process has raised, if that ended the simulation: the first failure is the one of a process
    that has not ended because of yet another one."""
    failures = []
    for outcome in outcomes:
        if outcome.poll(FAILURE_S):
            with contextlib.suppress(EOFError):
                found = outcome.recv()
                if isinstance(found, Exception):
                    failures.append(found)
    return min(failures, key=lambda each: isinstance(each, ProcessEnded), default=None)
