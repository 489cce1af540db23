"""Tests that a member whose interval ends late is waited for within limits, and that it learns when its work came too
late."""

from __future__ import annotations

import asyncio

import pytest
from support.training_swarm import WINDOW_TOKENS, Swarm, SyntheticInner, assert_equal_steps, config
from swarm.network.memory.memory_link import LinkModel
from swarm.testing import virtual_time
from swarm.training.trainer_events import ContributionLate, OuterStep, RoundAborted

pytestmark = pytest.mark.usefixtures("only_errors_logged")

INTERVAL_S = 20.0
NUM_STEPS, STEPS = 4, 20


@pytest.mark.parametrize(("overlap_steps", "later_s"), [(0, 2.0), (4, 1.0)])
def test_contribution_counts_when_it_is_only_a_little_late(overlap_steps: int, later_s: float) -> None:
    """Where rounds overlap, a slower member falls back further with each interval."""

    async def main() -> None:
        run = config(min_group=2, outer_steps=NUM_STEPS, interval_steps=STEPS, overlap_steps=overlap_steps)
        async with Swarm(run) as swarm:
            for index in range(2):
                await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=INTERVAL_S / STEPS))
            await swarm.join("late", inner=SyntheticInner(virtual_step_s=(INTERVAL_S + later_s) / STEPS))
            members = await swarm.finish()
            assert_equal_steps(members, NUM_STEPS)
        for member in members:
            assert [len(event.group) for event in member.of(OuterStep)] == [3] * NUM_STEPS
            assert not member.of(ContributionLate)
        whole = run.samples_per_interval * WINDOW_TOKENS
        assert [event.num_tokens for event in members[0].of(OuterStep)] == [3 * whole] * NUM_STEPS

    virtual_time.run(main())


def test_member_learns_by_how_much_its_contribution_came_too_late() -> None:
    """Its steps are so long that it cannot hurry, and the round is so slow that the member is ready before it ends."""

    async def main() -> None:
        run = config(min_group=2, outer_steps=NUM_STEPS, quorum_grace_s=1.0, interval_steps=1)
        async with Swarm(run, link=LinkModel(latency_s=0.5)) as swarm:
            for index in range(2):
                await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=INTERVAL_S))
            await swarm.join("late", inner=SyntheticInner(virtual_step_s=1.4 * INTERVAL_S))
            *others, late = await swarm.finish()
        events = late.of(ContributionLate)
        assert events
        assert any(event.late_s is not None and 0.1 < event.late_s < 10 and event.num_tokens for event in events)
        assert not any(other.of(ContributionLate) for other in others)

    virtual_time.run(main())


def test_member_learns_that_it_was_overtaken_while_it_trained() -> None:
    async def main() -> None:
        run = config(min_group=2, outer_steps=NUM_STEPS, quorum_grace_s=1.0, interval_steps=1)
        async with Swarm(run) as swarm:
            for index in range(2):
                await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=INTERVAL_S))
            await swarm.join("late", inner=SyntheticInner(virtual_step_s=2 * INTERVAL_S))
            *_, late = await swarm.finish()
        assert any(event.late_s is None and not event.num_tokens for event in late.of(ContributionLate))

    virtual_time.run(main())


def test_waiting_member_names_the_missing_peers_and_the_time() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=3, outer_steps=2), detection_s=1000.0) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=1.0))
            first, second, silent = swarm.members.values()
            while not first.of(OuterStep):
                await asyncio.sleep(0.1)
            assert first.trainer.waiting is None, "a member that trains does not wait"
            swarm.internet.partition([[silent.peer_id]])
            await asyncio.sleep(30.0)
            named = [each.trainer.waiting for each in (first, second)]
            assert all(waiting is not None and 20.0 < waiting.seconds <= 30.0 for waiting in named)
            assert all(waiting is not None and waiting.peers == (silent.peer_id,) for waiting in named)
            aborts = [event for each in (first, second) for event in each.of(RoundAborted)]
            assert {peer for event in aborts for peer in event.missing} == {silent.peer_id}
            swarm.internet.heal()
            await swarm.finish()

    virtual_time.run(main())


def test_member_loses_no_work_when_the_members_for_which_it_waited_come_back() -> None:
    """It has found them unreachable, and they take one of themselves for the coordinator."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=8)) as swarm:
            members = [await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=1.0)) for index in range(3)]
            while not all(len(member.of(OuterStep)) >= 3 for member in members):
                await asyncio.sleep(0.1)
            kept = [(each.name, each.trainer.state, each.trainer.certificate) for each in members[1:]]
            for name, *_ in kept:
                swarm.kill(name)
            await asyncio.sleep(30.0)
            for name, state, certificate in kept:
                inner = SyntheticInner(virtual_step_s=1.0)
                await swarm.join(name, inner=inner, state=state, certificate=certificate)
            await swarm.finish()
        assert members[0].of(RoundAborted), "the member never waited"
        assert not members[0].of(ContributionLate)

    virtual_time.run(main())


def test_run_begins_soon_after_its_last_founder_came_ten_minutes_late() -> None:
    """Members that wait name each other later attempts all the time, and the last one must still be able to join."""

    async def main() -> None:
        async with Swarm(config(min_group=3, outer_steps=1)) as swarm:
            for name in ("m0", "m1"):
                await swarm.join(name)
            await asyncio.sleep(600.0)
            await swarm.join("m2")
            await swarm.finish(timeout_s=60.0)

    virtual_time.run(main())


def test_each_member_names_all_missing_members_and_not_only_the_next_coordinator() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=4, max_group=5, outer_steps=50)) as swarm:
            members = [await swarm.join(f"m{index}") for index in range(5)]
            while not all(member.of(OuterStep) for member in members):
                await asyncio.sleep(0.05)
            for name in ("m0", "m1", "m2"):
                swarm.kill(name)
            await asyncio.sleep(60.0)
            dead = {member.peer_id for member in members[:3]}
            named = [member.trainer.waiting for member in members[3:]]
            assert all(waiting is not None and dead == {*waiting.peers} for waiting in named)

    virtual_time.run(main())
