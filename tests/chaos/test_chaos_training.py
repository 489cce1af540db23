"""kill -9 of members of one long run, at every phase of a round: real processes, real libp2p, another joins for each.

    .venv/bin/python -m pytest tests/chaos/test_chaos_training.py -m chaos -s

SWARM_CHAOS_TRIALS says how many there are to be, if not 100. The seed of a trial is its number.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop
from bench.report import Report
from chaos.armed import Kill, KillSwitch, Struck
from chaos.training_members import RUN, Member, Members, Plan
from support.network_worlds import libp2p_node
from support.training_swarm import signed
from swarm.training.state.certificate import RunSignatures
from swarm.training.trainer_events import IntervalDone, OuterStep, RoundAborted, StateFetched
from swarm_protocol.identity import Identity

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

NUM_TRIALS = int(os.environ.get("SWARM_CHAOS_TRIALS", "100"))
NUM_MEMBERS = 4
STANDBYS_AT_ONCE = 4
P50_S, P99_S = 2.0, 10.0
CATCHING_UP_S = 1.0
"""Time to catch up with steps committed while the state arrived: long for these intervals, short for real ones."""

SCENES = {
    # only the coordinator reaches this phase
    "coordinator before signing": ("round.sign", 1, True),
    "coordinator after signing": ("round.signed", 1, True),
    "owner before reducing": ("round.reducing", 1, False),
    "owner after reducing": ("round.reduced", 1, False),
    "owner half-way handing out": ("round.deliver", 2, False),
    "sender half-way": ("round.slice", 2, False),
    "backup with its copies": ("round.kept", 1, False),
    "voter before its vote": ("round.vote", 1, False),
    "voter half-way sending it": ("round.voted", 1, False),
    "voter after its vote": ("round.voted", NUM_MEMBERS - 1, False),
    "before applying": ("round.committed", 1, False),
    "after applying": ("round.applied", 1, False),
    "as the interval begins": ("interval", 1, False),
    "reporting": ("round.ready", 1, False),
}
"""The phase, how often it is reached before the kill, and whether anyone will do."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Describe one kill. `survivors` are the members that lived through it, and `step` is the outer step in which it
    struck."""

    scene: str
    struck: Struck
    survivors: tuple[Member, ...]
    joiner: Member
    step: int


def _progress(member: Member) -> dict[int, float]:
    """Return the time at which the member first had the state of each outer step."""
    times: dict[int, float] = {}
    told: list[tuple[float, OuterStep | StateFetched]] = [*member.of(OuterStep), *member.of(StateFetched)]
    for at_s, event in told:
        times[event.step] = min(at_s, times.get(event.step, at_s))
    return times


def _newest(members: Iterable[Member]) -> int:
    """Return the newest outer step that all of the members have."""
    return min(max(_progress(member), default=0) for member in members)


def _is_whole(members: Members) -> bool:
    """Return whether all members contributed to the newest step and have it."""
    last = [steps[-1][1] for member in members.alive if (steps := member.of(OuterStep))]
    is_everyone = len(last) == NUM_MEMBERS and len({event.step for event in last}) == 1
    return (
        is_everyone
        and all(len(event.group) == NUM_MEMBERS for event in last)
        and all(member.of(IntervalDone) for member in members.alive)
    )


async def _kill(members: Members, switch: KillSwitch, number: int, joiner: Member) -> Trial:
    scene = list(SCENES)[number % len(SCENES)]
    phase, nth, is_anyone = SCENES[scene]
    await members.until(lambda: _is_whole(members), within_s=120, what="getting all four into a group")
    who = "*" if is_anyone else random.Random(number).choice(members.alive).name
    switch.arm(Kill(number=number, who=who, phase=phase, nth=nth))
    await members.until(lambda: switch.struck(number) is not None, within_s=60, what=f"trial {number}: {phase}")
    struck = switch.struck(number)
    assert struck is not None
    victim = members.all[struck.who]
    await members.until(lambda: victim.has_ended, within_s=10, what=f"the death of {victim.name}")
    await asyncio.to_thread(victim.process.join)
    assert victim.process.exitcode == -signal.SIGKILL
    survivors = tuple(members.alive)
    assert len(survivors) == NUM_MEMBERS - 1
    step = min(_newest_at(each, struck.at_s) for each in survivors) + 1
    await members.until(lambda: _newest(survivors) > step, within_s=60, what=f"the steps after trial {number}, {scene}")
    members.call(joiner)
    await members.until(lambda: bool(joiner.of(IntervalDone)), within_s=60, what=f"{joiner.name} to train")
    return Trial(scene, struck, survivors, joiner, step)


async def _trials(folder: Path) -> tuple[list[Trial], Members]:
    switch, trials = KillSwitch(folder), list[Trial]()
    async with await libp2p_node(folder / "seed.identity") as seed:
        plan = Plan(folder=folder, peers=await seed.addrs())
        async with Members(plan) as members:
            for member in await _ready(members, range(NUM_MEMBERS)):
                members.call(member)
            standbys: list[Member] = []
            for number in range(NUM_TRIALS):
                if not standbys:
                    first = NUM_MEMBERS + number
                    standbys = await _ready(members, range(first, first + min(STANDBYS_AT_ONCE, NUM_TRIALS - number)))
                trials.append(await _kill(members, switch, number, standbys.pop()))
                print(f"{number:4} {trials[-1].scene:28} {trials[-1].struck.who}", flush=True)
            await members.until(lambda: _is_whole(members), within_s=120, what="the last step of all")
        return trials, members


async def _ready(members: Members, numbers: Iterable[int]) -> list[Member]:
    started = [members.stand_by(f"m{number}") for number in numbers]
    await members.until(
        lambda: all(each.is_ready or each.has_ended for each in started), within_s=300, what="starting processes"
    )
    assert all(each.is_ready for each in started), "a process could not start: see its log"
    return started


def _newest_at(member: Member, at_s: float) -> int:
    """Return the outer step whose state the member had at that time."""
    return max((step for step, since_s in _progress(member).items() if since_s <= at_s), default=0)


def _undisturbed_s(trials: list[Trial]) -> float:
    """Return the median time of the steps right before the kills, in which all four members took part."""
    times = [(_progress(member), trial.step - 1) for trial in trials for member in trial.survivors]
    return statistics.median(each[step] - each[step - 1] for each, step in times if step - 1 in each)


def _delay_s(trial: Trial, step_s: float) -> float:
    """Return the delay of the slowest survivor over the step in which the kill struck and the next one."""
    times = [_progress(member) for member in trial.survivors]
    return max(each[trial.step + 1] - each[trial.step - 1] for each in times) - 2 * step_s


def _assert_all_steps_are_true(members: Members) -> None:
    """Assert that each step that any member reported, including dead ones, has a certificate and is equal for all
    members."""
    signatures = RunSignatures.of_run(signed(RUN), Identity.generate(), "test")
    digests: dict[int, set[str]] = defaultdict(set)
    for member in members.all.values():
        for told in member.told:
            if isinstance(told.event, OuterStep):
                proof = signatures.check_certificate(told.certificate, time.time())
                assert (proof.outer_step, proof.outcome.state_digest.hex()) == (told.event.step, told.event.digest)
            if isinstance(told.event, OuterStep | StateFetched) and told.event.step:
                digests[told.event.step].add(told.event.digest)
    assert all(len(each) == 1 for each in digests.values()), digests


def _assert_joiner_trained_at_once(members: Members, joiner: Member) -> None:
    """Assert that a joiner trains in the next interval after it has caught up. The round under way may begin without
    it, so that at most one interval does."""
    arrived_s, _ = joiner.of(StateFetched)[0]
    trained = joiner.of(IntervalDone)[0][1].step
    newest = max(_newest_at(member, arrived_s + CATCHING_UP_S) for member in members.all.values())
    assert trained <= newest + 3, f"{joiner.name} had a state at outer step {newest}, and trained for {trained}"


def test_run_goes_on_with_one_state_after_any_member_is_killed_at_any_phase(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        trials, members = runner.run(_trials(tmp_path))
    _assert_all_steps_are_true(members)
    step_s = _undisturbed_s(trials)
    delays: dict[str, list[float]] = defaultdict(list)
    report = Report(f"{len(trials)} kills of one of {NUM_MEMBERS}; a step takes {step_s:.2f} s undisturbed")
    for trial in trials:
        _assert_joiner_trained_at_once(members, trial.joiner)
        delays[trial.scene].append(_delay_s(trial, step_s))
    for scene, each in delays.items():
        report.row(scene, trials=len(each), median_delay_s=statistics.median(each), worst_delay_s=max(each))
    ordered = sorted(delay for each in delays.values() for delay in each)
    p50, p99 = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
    joining = statistics.median(trial.joiner.of(IntervalDone)[0][0] - trial.joiner.called_s for trial in trials)
    num_aborts = sum(len(member.of(RoundAborted)) for member in members.all.values())
    report.row("all", trials=len(trials), median_delay_s=p50, p99_delay_s=p99, worst_delay_s=ordered[-1])
    report.row("joiner, until its first interval is done", median_s=joining)
    report.row("attempts given up, over all members", trials=num_aborts)
    report.show()
    assert p50 < P50_S
    assert p99 < P99_S
