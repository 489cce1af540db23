"""Stop members of a real run by SIGSTOP at given phases, continue them later, and measure what that cost the others."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from chaos.armed import Kill, KillSwitch
from chaos.training_members import Member, Members, Plan
from support.network_worlds import libp2p_node
from swarm.training.trainer_events import OuterStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Describe one stop. `longest_s` is the longest time between two steps of any other member. `back_s` is the time
    from continuing the process until all members were in one group again."""

    phase: str
    longest_s: float
    num_steps_meanwhile: int
    back_s: float


async def stop_members(folder: Path, phases: Sequence[str], *, num_members: int, stopped_s: float) -> list[Stop]:
    """Run one trial for each of `phases` in one run. Each stopped process is continued after `stopped_s`, or, if that
    is later, once the others have taken two steps without it."""
    switch = KillSwitch(folder)
    async with (
        await libp2p_node(folder / "seed.identity") as seed,
        Members(Plan(folder=folder, peers=await seed.addrs())) as members,
    ):
        started = [members.stand_by(f"m{number}") for number in range(num_members)]
        await members.until(lambda: all(each.is_ready for each in started), within_s=120, what="starting")
        for member in started:
            members.call(member)
        return [await _stop(members, switch, number, phase, stopped_s=stopped_s) for number, phase in enumerate(phases)]


async def _stop(members: Members, switch: KillSwitch, number: int, phase: str, *, stopped_s: float) -> Stop:
    everyone = members.alive
    await members.until(lambda: _is_whole(everyone), within_s=60, what="getting all into a group")
    switch.arm(Kill(number=number, who="*", phase=phase, is_stop=True))
    await members.until(lambda: switch.struck(number) is not None, within_s=60, what=f"reaching {phase}")
    struck = switch.struck(number)
    assert struck is not None
    victim = members.all[struck.who]
    others = [each for each in everyone if each is not victim]
    try:
        await members.until(
            lambda: all(_num_steps(each, struck.at_s) >= 2 for each in others),
            within_s=60,
            what=f"two steps while {victim.name} is stopped at {phase}",
        )
        await asyncio.sleep(struck.at_s + stopped_s - time.monotonic())
    finally:
        assert victim.process.pid is not None
        os.kill(victim.process.pid, signal.SIGCONT)
    continued_s, num_steps = time.monotonic(), max(_num_steps(each, struck.at_s) for each in others)
    newest = max(event.step for each in everyone for _, event in each.of(OuterStep))
    await members.until(
        lambda: _is_whole(everyone) and victim.of(OuterStep)[-1][1].step > newest,
        within_s=60,
        what=f"{victim.name} to be back",
    )
    return Stop(
        phase=phase,
        longest_s=max(_longest_s(each, struck.at_s) for each in others),
        num_steps_meanwhile=num_steps,
        back_s=time.monotonic() - continued_s,
    )


def _is_whole(members: Sequence[Member]) -> bool:
    """Return whether the newest step of all of them is the same, and all contributed to it."""
    last = [steps[-1][1] for each in members if (steps := each.of(OuterStep))]
    return len(last) == len(members) == min(len(each.group) for each in last) and len({each.step for each in last}) == 1


def _num_steps(member: Member, since_s: float) -> int:
    return sum(at_s > since_s for at_s, _ in member.of(OuterStep))


def _longest_s(member: Member, since_s: float) -> float:
    """Return the longest time between two steps, starting with the last one before `since_s`."""
    times = [at_s for at_s, _ in member.of(OuterStep)]
    return max(after - before for before, after in pairwise(times) if after > since_s)
