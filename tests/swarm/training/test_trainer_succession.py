"""Tests which members go on, and after how long, in one history when members leave permanently or a network is
partitioned."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from support.training_swarm import (
    Member,
    Swarm,
    SyntheticInner,
    assert_equal_steps,
    config,
    identity_of,
    interval_cost,
)
from swarm.testing import virtual_time
from swarm.training.state.state_transfer import Donor
from swarm.training.trainer_events import Admitted, OtherHistory, OuterStep, RoundAborted
from swarm_protocol.errors import PeerRefused

pytestmark = pytest.mark.usefixtures("only_errors_logged")

AFTER_S = 20.0
WITHIN_S = 15.0
"""The longest time until a coordinator with too few members gives its attempt up and the next one takes over."""


async def founded(swarm: Swarm, num_members: int) -> list[Member]:
    """Return members that have committed an outer step together, in the order of their peer ids."""
    for index in range(num_members):
        await swarm.join(f"m{index}")
    while not all(member.of(OuterStep) for member in swarm.members.values()):
        await asyncio.sleep(0.05)
    return sorted(swarm.members.values(), key=lambda member: member.peer_id)


def assert_one_history(members: list[Member]) -> None:
    """Assert that all members which reported a state of an outer step as committed reported the same one, and that none
    took members of its own history for those of another."""
    assert not any(member.of(OtherHistory) for member in members)
    for step in range(1, 100):
        assert len({event.digest for member in members for event in member.of(OuterStep) if event.step == step}) <= 1


def every(interval_s: float) -> SyntheticInner:
    return SyntheticInner(virtual_step_s=interval_s / 5)


async def until_step_after(members: list[Member], num_steps: int, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not all(len(member.of(OuterStep)) > num_steps for member in members):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("num_members", "dead"), [(4, (2, 3)), (8, (0, 1, 7)), (2, (1,))])
def test_majority_goes_on_after_majority_after_s_when_members_are_gone(num_members: int, dead: tuple[int, ...]) -> None:
    """Two new members join, so that the group reaches min_group."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=7, majority_after_s=AFTER_S)) as swarm:
            members = await founded(swarm, num_members)
            for index in dead:
                swarm.kill(members[index].name)
            fresh = [await swarm.join(name) for name in ("fresh0", "fresh1")]
            living = [member for index, member in enumerate(members) if index not in dead]
            num_steps = max(len(member.of(OuterStep)) for member in members)
            await asyncio.sleep(AFTER_S / 2)
            assert all(len(member.of(OuterStep)) <= num_steps + 1 for member in living), (
                "a majority went on before the others had time to come back"
            )
            await until_step_after(living, num_steps + 1, AFTER_S / 2 + WITHIN_S)
            assert_equal_steps(await swarm.finish(), 7)
            assert {member.peer_id for member in (*living, *fresh)} == set(living[0].of(OuterStep)[-1].group)
            assert_one_history(list(swarm.members.values()))

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize(("after_s", "dead"), [(AFTER_S, (0, 1)), (0.0, (2, 3))], ids=["half without", "never"])
def test_less_than_a_majority_waits_for_the_others(after_s: float, dead: tuple[int, ...]) -> None:
    """Half of the members without the first one is no majority: the other half may go on. A run may also forbid
    majorities."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=7, majority_after_s=after_s)) as swarm:
            members = await founded(swarm, 4)
            for index in dead:
                swarm.kill(members[index].name)
            await swarm.join("fresh0")
            await swarm.join("fresh1")
            await asyncio.sleep(5.0)
            living = [member for index, member in enumerate(members) if index not in dead]
            before = [len(member.of(OuterStep)) for member in living]
            await asyncio.sleep(10 * AFTER_S)
            assert [len(member.of(OuterStep)) for member in living] == before

    virtual_time.run(main(), compute_s=interval_cost)


def test_one_half_goes_on_in_a_partition_and_the_other_half_follows_when_it_heals() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=7, majority_after_s=AFTER_S)) as swarm:
            members = await founded(swarm, 4)
            swarm.internet.partition([[member.peer_id for member in members[:2]]])
            await asyncio.sleep(1.0)
            before = len(members[2].of(OuterStep))
            await until_step_after(members[:2], before + 1, 3 * AFTER_S)
            assert all(len(member.of(OuterStep)) <= before + 1 for member in members[2:])
            swarm.internet.heal()
            assert_equal_steps(await swarm.finish(), 7)
            assert_one_history(members)

    virtual_time.run(main(), compute_s=interval_cost)


def test_members_report_another_history_when_the_run_was_begun_on_both_sides_of_a_partition() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=1, outer_steps=30)) as swarm:
            members = [await swarm.join(name) for name in ("m0", "m1", "m2")]
            swarm.internet.partition([[members[2].peer_id]])
            await asyncio.sleep(10.0)
            assert all(member.of(OuterStep) for member in members)
            swarm.internet.heal()
            await swarm.finish()
            assert members[0].digest == members[1].digest != members[2].digest
            other_side = {members[0].peer_id: {members[2].peer_id}, members[1].peer_id: {members[2].peer_id}}
            other_side[members[2].peer_id] = {members[0].peer_id, members[1].peer_id}
            told = {
                member.peer_id: {peer for event in member.of(OtherHistory) for peer in event.peers}
                for member in members
            }
            assert any(told.values()), "no member on the side that was behind said that there are two histories"
            assert all(peers <= other_side[me] for me, peers in told.items())

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize(("num_ahead", "num_behind"), [(4, 2), (3, 3), (2, 4)])
def test_first_group_without_an_outer_step_follows_one_that_has_made_some_unless_it_is_larger(
    num_ahead: int, num_behind: int
) -> None:
    """A few fresh keys could otherwise take over a run that begins, with steps that they made up."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=6)) as swarm:
            swarm.internet.partition([[identity_of(f"ahead{index}").peer_id for index in range(num_ahead)]])
            ahead = [await swarm.join(f"ahead{index}", inner=every(20.0)) for index in range(num_ahead)]
            behind = [await swarm.join(f"behind{index}", inner=every(100.0)) for index in range(num_behind)]
            while not all(member.of(OuterStep) for member in ahead):
                await asyncio.sleep(0.5)
            assert all(member.of(Admitted) and not member.of(OuterStep) for member in behind)
            swarm.internet.heal()
            await swarm.finish(timeout_s=2000.0)
            are_one = len({member.digest for member in swarm.members.values()}) == 1
            assert are_one == (num_ahead >= num_behind)
            assert all(bool(member.of(OtherHistory)) != are_one for member in behind)

    virtual_time.run(main())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_newcomers_that_cannot_get_the_state_do_not_begin_the_run_a_second_time(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are like two machines of one home whose line breaks while they fetch the state."""
    busy = list[str]()
    give = Donor.manifest

    async def manifest(donor: Donor, peer: str, request: bytes) -> bytes:
        if peer in busy:
            raise PeerRefused("this member is busy")
        return await give(donor, peer, request)

    monkeypatch.setattr(Donor, "manifest", manifest)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=20)) as swarm:
            await founded(swarm, 3)
            late = [await swarm.join(name) for name in ("late0", "late1")]
            busy.extend(member.peer_id for member in late)
            await asyncio.sleep(1.0)
            swarm.internet.partition([busy])
            await asyncio.sleep(120.0)
            for member in late:
                assert not member.of(Admitted)
                assert not member.of(OuterStep)
                (told,) = member.of(RoundAborted)
                assert "must not begin the run a second time" in told.reason
                assert member.trainer.waiting is not None
                assert member.trainer.waiting.seconds > 100.0
            if is_stopped:
                late[0].trainer.stop()
                await swarm.finish("late0", timeout_s=1.0)
                del swarm.members["late0"]
                await late[0].trainer.close()
            busy.clear()
            swarm.internet.heal()
            members = await swarm.finish()
            assert_equal_steps(members, 20)
            assert_one_history(members)

    virtual_time.run(main(), compute_s=partial(interval_cost, interval_s=10.0))


def test_founder_that_waits_for_the_state_of_a_first_group_without_it_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(_donor: Donor, _peer: str, _request: bytes) -> bytes:
        raise PeerRefused("this member is busy")

    monkeypatch.setattr(Donor, "manifest", refuse)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=20)) as swarm:
            swarm.internet.partition([[identity_of("apart").peer_id]])
            apart = await swarm.join("apart")
            await asyncio.sleep(5.0)
            assert apart.trainer.has_joined
            members = [await swarm.join(f"m{index}") for index in range(3)]
            while not all(member.of(OuterStep) for member in members):
                await asyncio.sleep(0.1)
            swarm.internet.heal()
            while not any("a second time" in event.reason for event in apart.of(RoundAborted)):
                await asyncio.sleep(0.1)
            await asyncio.sleep(5.0)
            apart.trainer.stop()
            await swarm.finish("apart", timeout_s=0.1)

    virtual_time.run(main(), compute_s=partial(interval_cost, interval_s=10.0))
