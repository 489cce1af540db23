"""Tests a member that falls silent for a while, as a stopped process does: its connections stay open without traffic.

The others go on within seconds and with one state, and it is back by itself. In virtual time a cut connection stands
for the stopped process; `tests/chaos` stops real ones."""

from __future__ import annotations

import asyncio

import pytest
from support.faults import Fault, FaultScript
from support.training_swarm import Member, Swarm, SyntheticInner, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.allreduce.parts import FRAME_VALUES
from swarm.training.allreduce.peer_connections import QUIET_S, SILENT_S, SLOWEST_MEMBER_BYTES_PER_S
from swarm.training.member.peer_calls import MISSING_S
from swarm.training.run.run_config import RunConfig
from swarm.training.trainer_events import OuterStep, RoundAborted

pytestmark = pytest.mark.usefixtures("only_errors_logged")

STOPPED_S = 18.0
INTERVAL_S = GRACE_S = 2.0
ROUND_S = 1.0
FOUND_S = QUIET_S + SILENT_S + ROUND_S
"""The time until the others notice in a reduction that a member is silent."""
MOST_S = INTERVAL_S + FOUND_S + MISSING_S + GRACE_S + ROUND_S
"""The time between two steps of the others: it may be drawn to form the next group, and who does form it may not have
found out itself that it is silent."""


async def run_with_silence(run: RunConfig, fault: Fault, num_members: int) -> tuple[Member, list[Member]]:
    """Return the member that `fault` silenced, and the other members, at the end of the run."""
    silenced: list[Member] = []

    def silence(who: str) -> None:
        silenced.append(swarm.members[who])
        swarm.internet.partition([[silenced[0].peer_id]])
        asyncio.get_running_loop().call_later(STOPPED_S, swarm.internet.heal)

    script = FaultScript([Fault(who=fault.who, phase=fault.phase, what=silence, nth=fault.nth)])
    async with Swarm(run, script, detection_s=10 * STOPPED_S) as swarm:
        for index in range(num_members):
            await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=0.4))
        members = await swarm.finish()
        script.assert_all_fired()
        assert_equal_steps(members, run.outer_steps)
        return silenced[0], [each for each in members if each is not silenced[0]]


def longest_step_s(member: Member) -> float:
    return max(event.seconds for event in member.of(OuterStep))


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ("round.sign", "test"),
        ("round.slice", "test"),
        # with these names the silent member is also drawn as the coordinator of the next attempt
        ("round.slice", "three"),
        ("round.slice", "six"),
        ("round.reduced", "test"),
        ("round.proposed", "test"),
        ("round.committed", "test"),
    ],
)
def test_member_silent_at_any_phase_delays_the_others_for_seconds_and_comes_back(phase: str, name: str) -> None:
    async def main() -> None:
        # in the slowest case the member is back at the tenth step
        run = config(min_group=2, outer_steps=11, quorum_grace_s=GRACE_S, name=name)
        nth = 2 if phase.startswith("round.sign") else 9
        silenced, others = await run_with_silence(run, Fault(who="*", phase=phase, what="stall", nth=nth), 4)
        assert max(map(longest_step_s, others)) < MOST_S
        groups = [event.group for event in others[0].of(OuterStep)]
        with_it = [silenced.peer_id in group for group in groups]
        assert not all(with_it), "the others took no step without the silent member"
        assert with_it[-1], "the member did not come back"

    virtual_time.run(main())


@pytest.mark.parametrize("phase", ["round.reducing", "round.reduced", "round.deliver"])
def test_silent_owner_is_waited_for_once_and_its_backup_is_audited(phase: str) -> None:
    async def main() -> None:
        run = config(min_group=2, outer_steps=14, quorum_grace_s=GRACE_S)
        _, others = await run_with_silence(run, Fault(who="*", phase=phase, what="stall", nth=9), 5)
        assert not any(member.of(RoundAborted) for member in others)
        assert max(map(longest_step_s, others)) < INTERVAL_S + FOUND_S + ROUND_S

    virtual_time.run(main())


@pytest.mark.parametrize("name", ["two", "four"])
def test_member_on_the_slowest_supported_connection_does_not_count_as_silent(name: str) -> None:
    """Its frames to all others share the connection, and its answers to calls wait behind them for longer than
    SILENT_S."""

    async def main() -> None:
        run = config(min_group=8, outer_steps=1, aggregator="centered_clip", name=name)
        async with Swarm(run) as swarm:
            for index in range(8):
                rate = None if index else SLOWEST_MEMBER_BYTES_PER_S
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=8 * FRAME_VALUES), bytes_per_s=rate)
            members = await swarm.finish()
            assert_equal_steps(members, 1)
            assert max(map(longest_step_s, members)) > 2 * SILENT_S
            slow, *others = members
            assert all(slow.peer_id in other.of(OuterStep)[-1].group for other in others)
            # the others may decide without its vote, while it still delivers its part and audits theirs
            assert not any(other.of(RoundAborted) for other in others)

    virtual_time.run(main())


def test_members_that_all_have_the_slowest_supported_connection_have_time_for_a_step() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=4, outer_steps=1)) as swarm:
            for index in range(4):
                inner = SyntheticInner(num_values=16 * FRAME_VALUES)
                await swarm.join(f"m{index}", inner=inner, bytes_per_s=SLOWEST_MEMBER_BYTES_PER_S)
            members = await swarm.finish()
            assert_equal_steps(members, 1)
            assert not any(member.of(RoundAborted) for member in members)

    virtual_time.run(main())
