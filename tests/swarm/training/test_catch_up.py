"""A member that missed a few outer steps follows by their parts, not by a whole state."""

from __future__ import annotations

import asyncio

import pytest
from swarm.testing import virtual_time
from swarm.training import replica
from swarm.training.events import OuterStep, StateFetched
from training_swarm import NUM_VALUES, Swarm, assert_equal_steps, config

STATE_BYTES = 8 * NUM_VALUES


def _cost(function: object) -> float:
    """An interval takes longer than it takes to look at who else is there."""
    return 4.0 if getattr(function, "__name__", "") == "_stretch" else 0.001


def bytes_and_steps_of_a_member_that_was_away() -> tuple[int, int]:
    """How many bytes it fetched, and how many steps it had missed."""

    async def main() -> tuple[int, int]:
        async with Swarm(config(min_group=2, outer_steps=16, quorum_grace_s=3.0)) as swarm:
            members = [await swarm.join(f"m{number}") for number in range(4)]
            away = members[3]
            while not away.of(OuterStep):
                await asyncio.sleep(0.05)
            others = [member.peer_id for member in members[:3]]
            swarm.internet.partition([others, [away.peer_id]])
            before = len(away.of(OuterStep))
            while len(members[0].of(OuterStep)) < before + 2:
                await asyncio.sleep(0.05)
            swarm.internet.heal()
            assert_equal_steps(await swarm.finish(), 16)
            fetched = away.of(StateFetched)[0]
            return fetched.num_bytes, fetched.step - max(
                event.step for event in away.of(OuterStep) if event.step < fetched.step
            )

    return virtual_time.run(main(), compute_s=_cost)


def test_member_that_missed_a_few_steps_follows_by_their_parts() -> None:
    num_bytes, num_steps = bytes_and_steps_of_a_member_that_was_away()
    assert 2 <= num_steps <= replica.NUM_PARTS
    assert num_steps * NUM_VALUES <= num_bytes < 1.1 * num_steps * NUM_VALUES


def test_member_whose_missed_parts_are_gone_fetches_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "NUM_PARTS", 1)
    num_bytes, num_steps = bytes_and_steps_of_a_member_that_was_away()
    assert num_steps >= 2
    assert num_bytes == STATE_BYTES
