"""Tests runs with more trainers than a round has places: all of them work, and all have the state that the round
commits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from support.leaks import no_leaks
from support.training_swarm import Member, Swarm, SyntheticInner, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.round.round_state import coordinator_of
from swarm.training.run.run_config import RunConfig
from swarm.training.trainer_events import ContributionLate, IntervalDone, OuterStep, RoundAborted, StateFetched

pytestmark = pytest.mark.usefixtures("only_errors_logged")

STEP_S = 0.4
TOKENS = 5 * 2 * 4
"""The number of tokens of one trainer's interval."""


def clustered(**changes: object) -> RunConfig:
    """Return a run with three heads, each with at most three followers."""
    return config(**{"min_group": 2, "max_group": 3, "cluster_size": 4, "outer_steps": 6, **changes})


async def join(swarm: Swarm, name: str, step_s: float = STEP_S) -> Member:
    return await swarm.join(name, inner=SyntheticInner(virtual_step_s=step_s))


async def join_all(swarm: Swarm, num_trainers: int) -> None:
    """Start trainers until there are `num_trainers`."""
    for index in range(len(swarm.members), num_trainers):
        await join(swarm, f"t{index:02}")


def tokens_by_step(members: Sequence[Member]) -> dict[int, int]:
    return {event.step: event.num_tokens for member in members for event in member.of(OuterStep)}


async def until_step(swarm: Swarm, step: int) -> None:
    async with asyncio.timeout(300):
        while not any(event.step == step for member in swarm.members.values() for event in member.of(OuterStep)):
            await asyncio.sleep(0.01)


def heads_of(swarm: Swarm) -> list[Member]:
    states = [member.trainer.state for member in swarm.members.values() if member.trainer.state]
    newest = max(states, key=lambda state: state.outer_step)
    return [member for member in swarm.members.values() if member.peer_id in newest.manifest.roster]


def followers_of(swarm: Swarm) -> list[Member]:
    heads = heads_of(swarm)
    return [member for member in swarm.members.values() if member not in heads]


def test_24_trainers_in_clusters_of_6_all_train_one_state() -> None:
    async def main() -> None:
        async with Swarm(clustered(max_group=4, cluster_size=6, outer_steps=3)) as swarm:
            await join_all(swarm, 4)
            await asyncio.sleep(3.0)  # until the first group forms, every trainer calls every other one repeatedly
            await join_all(swarm, 24)
            members = await swarm.finish()
            assert_equal_steps(members, 3)
            assert tokens_by_step(members) == {1: 4 * TOKENS, 2: 24 * TOKENS, 3: 24 * TOKENS}
            state = members[0].trainer.state
            assert state is not None
            assert len(state.manifest.roster) == 4
            # no sample was leased twice, and none was left out
            assert state.manifest.num_committed == sum(tokens_by_step(members).values()) // 4
            assert state.manifest.stripes[0].cursor.holes == ()

    virtual_time.run(main())


def test_killed_follower_costs_no_step_and_no_work_of_others() -> None:
    async def main() -> None:
        with no_leaks():
            async with Swarm(clustered()) as swarm:
                await join_all(swarm, 12)
                await until_step(swarm, 2)
                await asyncio.sleep(STEP_S)
                swarm.kill(followers_of(swarm)[0].name)
                members = await swarm.finish()
                assert_equal_steps(members, 6)
                assert [tokens_by_step(members)[step] for step in (2, 3, 4, 6)] == [
                    12 * TOKENS,
                    *(11 * TOKENS for _ in range(3)),
                ]
                assert not any(member.of(ContributionLate) for member in members)

    virtual_time.run(main())


@pytest.mark.parametrize("is_coordinator", [False, True], ids=["head", "coordinator"])
def test_followers_of_a_killed_head_keep_working(is_coordinator: bool) -> None:
    """Their second heads bring their work, and a trainer takes the dead head's place in the round."""

    async def main() -> None:
        async with Swarm(clustered()) as swarm:
            await join_all(swarm, 12)
            await until_step(swarm, 2)
            await asyncio.sleep(STEP_S)
            heads = {head.peer_id: head for head in heads_of(swarm)}
            service = heads_of(swarm)[0].trainer._steps.service
            assert service is not None
            assert service.driver is not None
            assert service.driver.setup.step == 3
            coordinator = coordinator_of(service.driver.setup.beacon(0), heads)
            others = [head for head in heads if head != coordinator]
            swarm.kill(heads[coordinator if is_coordinator else others[0]].name)
            members = await swarm.finish()
            assert_equal_steps(members, 6)
            assert [tokens_by_step(members)[step] for step in (3, 4, 6)] == [11 * TOKENS] * 3
            assert len(heads_of(swarm)) == 3

    virtual_time.run(main())


def test_newcomer_catches_up_and_contributes_to_the_step_after_the_next() -> None:
    async def main() -> None:
        async with Swarm(clustered()) as swarm:
            await join_all(swarm, 10)
            await until_step(swarm, 2)
            newcomer = await join(swarm, "newcomer")
            members = await swarm.finish()
            assert_equal_steps(members, 6)
            assert newcomer.of(StateFetched)
            assert newcomer.of(IntervalDone)[0].step <= 4
            assert tokens_by_step(members)[6] == 11 * TOKENS

    virtual_time.run(main())


def test_trainer_beyond_all_clusters_learns_that_the_run_is_full_and_gets_the_next_vacant_place() -> None:
    async def main() -> None:
        async with Swarm(clustered(max_group=2, cluster_size=2, outer_steps=8)) as swarm:
            await join_all(swarm, 4)
            await until_step(swarm, 2)
            waiting = await join(swarm, "waiting")
            await until_step(swarm, 4)
            assert any("full: 4 trainers" in event.reason for event in waiting.of(RoundAborted))
            assert not waiting.of(IntervalDone)
            leaving = followers_of(swarm)[0]
            leaving.trainer.stop()
            members = await swarm.finish()
            assert_equal_steps([member for member in members if member is not leaving], 8)
            assert waiting.of(IntervalDone)
            assert tokens_by_step(members)[8] == 4 * TOKENS

    virtual_time.run(main())


def test_leaving_follower_brings_its_last_work_and_is_not_waited_for() -> None:
    async def main() -> None:
        async with Swarm(clustered()) as swarm:
            await join_all(swarm, 9)
            await until_step(swarm, 2)
            await asyncio.sleep(STEP_S)
            leaving = followers_of(swarm)[0]
            leaving.trainer.stop()
            await swarm.finish(leaving.name)
            assert leaving.of(OuterStep)[-1].step == 3
            members = await swarm.finish()
            assert tokens_by_step(members)[3] == 9 * TOKENS
            assert tokens_by_step(members)[4] == 8 * TOKENS
            assert max(event.seconds for member in members for event in member.of(OuterStep) if event.step == 4) < 3.0

    virtual_time.run(main())


def test_follower_that_is_too_slow_loses_its_work_and_delays_nobody() -> None:
    async def main() -> None:
        async with Swarm(clustered()) as swarm:
            await join_all(swarm, 8)
            slow = await join(swarm, "slow", step_s=1.5 * STEP_S)
            members = await swarm.finish()
            assert_equal_steps(members, 6)
            assert slow.peer_id in {member.peer_id for member in followers_of(swarm)}
            assert slow.of(ContributionLate)
            assert tokens_by_step(members)[6] == 8 * TOKENS

    virtual_time.run(main())


def test_follower_that_lies_about_its_work_is_refused_and_moves_the_state_no_more_than_a_member() -> None:
    async def main() -> None:
        async with Swarm(clustered()) as swarm:
            await join_all(swarm, 8)
            await until_step(swarm, 1)
            await swarm.join("liar", inner=SyntheticInner(virtual_step_s=STEP_S, corrupt=lambda x_N: x_N - 1e3))
            members = await swarm.finish()
            assert_equal_steps(members, 6)
            assert swarm.members["liar"] in followers_of(swarm)
            state = members[0].trainer.state
            assert state is not None
            assert float((state.theta_N - members[0].inner.target_N).abs().max()) < 10.0

    virtual_time.run(main())


def test_states_stay_equal_in_clusters_with_overlap_and_fragments() -> None:
    async def main() -> None:
        async with Swarm(clustered(overlap_steps=2, fragments=2, outer_steps=8, error_feedback=True)) as swarm:
            await join_all(swarm, 9)
            members = await swarm.finish()
            assert_equal_steps(members, 8)
            assert tokens_by_step(members)[8] == 9 * TOKENS

    virtual_time.run(main())
