"""Tests that a member whose copy of the state was changed in memory notices it at the next commit and repairs only the
changed chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.training_swarm import NUM_VALUES, Member, Swarm, assert_equal_steps, config, interval_cost
from swarm.testing import virtual_time
from swarm.training.allreduce.audit import Auditing
from swarm.training.state import replica_state
from swarm.training.trainer_events import OuterStep, RoundAborted, StateFetched
from swarm_compression.codec import Data

CHUNK_BYTES = 1 << 12
"""Smaller than real chunks, so that a small state has six of them. Theta ends in the third one."""
LAST_CHUNK_BYTES = 8 * NUM_VALUES - 5 * CHUNK_BYTES

COST = partial(interval_cost, other_s=0.001)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_state, "CHUNK_BYTES", CHUNK_BYTES)


def flip(member: Member, what: str, index: int) -> None:
    """Change one bit, as a memory fault does."""
    held = member.trainer.state
    assert held is not None
    x_N = {"theta": held.theta_N, "momentum": held.momentum_N}[what]
    x_N.view(torch.int32)[index] ^= 1 << 20


async def reach_step(member: Member, step: int) -> None:
    while member.trainer.state is None or member.trainer.state.outer_step < step:
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("what", "index", "num_bytes"),
    [
        ("theta", 5, CHUNK_BYTES),
        ("theta", 2900, CHUNK_BYTES),
        # the next step moves theta by the damaged momentum, too
        ("momentum", 2900, CHUNK_BYTES + LAST_CHUNK_BYTES),
    ],
)
def test_member_with_a_damaged_replica_fetches_only_the_chunks_that_differ_and_continues(
    what: str, index: int, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=6)) as swarm:
            members = [await swarm.join(f"m{number}") for number in range(4)]
            damaged = members[1]
            await reach_step(damaged, 2)
            assert damaged.trainer.state is not None
            step = damaged.trainer.state.outer_step
            flip(damaged, what, index)
            assert_equal_steps(await swarm.finish(), 6)
            [repaired] = damaged.of(StateFetched)
            assert (repaired.step, repaired.num_bytes) == (step + 1, num_bytes)
            assert [event.step for event in damaged.of(OuterStep)] == [each for each in range(1, 7) if each != step + 1]
            assert damaged.peer_id in damaged.of(OuterStep)[-1].group
            assert [member.trainer.num_mismatches for member in members] == [0, 1, 0, 0]
            assert not [event for member in members if member is not damaged for event in member.of(StateFetched)]
        assert "is damaged" in caplog.text

    virtual_time.run(main(), compute_s=COST)


def test_damage_is_found_in_a_fragment_that_the_step_does_not_move() -> None:
    async def main() -> None:
        async with Swarm(replace(config(min_group=2, outer_steps=6), fragments=2)) as swarm:
            members = [await swarm.join(f"m{number}") for number in range(4)]
            await reach_step(members[2], 2)
            for index in (10, NUM_VALUES - 10):
                flip(members[2], "theta", index)
            assert_equal_steps(await swarm.finish(), 6)
            repaired = members[2].of(StateFetched)
            assert len(repaired) == 1
            assert repaired[0].num_bytes == 2 * CHUNK_BYTES

    virtual_time.run(main(), compute_s=COST)


@pytest.mark.parametrize(("victim", "what"), [(0, "momentum"), (1, "momentum"), (1, "theta")])
def test_damaged_one_of_two_members_repairs_itself_before_the_next_outcome(
    victim: int, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=6)) as swarm:
            members = [await swarm.join(f"m{number}") for number in range(2)]
            await reach_step(members[victim], 2)
            flip(members[victim], what, 2900)
            assert_equal_steps(await swarm.finish(), 6)
            assert all(member.of(RoundAborted) for member in members)
            assert [event.step for event in members[0].of(OuterStep)] == list(range(1, 7))
            assert [member.trainer.num_mismatches for member in members] == [int(each == victim) for each in (0, 1)]
        assert caplog.text.count("is damaged: repairing") == 1

    virtual_time.run(main(), compute_s=COST)


def test_member_that_finds_its_replica_damaged_when_it_applies_parts_fetches_only_what_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the parts of a step that others commit, but has not made the state from them yet."""
    audit, members, steps = Auditing.audit, list[Member](), list[int]()

    async def interrupted(self: Auditing, parts: Sequence[Data], within_s: float) -> None:
        if not steps and self._group.step == 3 and self._streams.me == members[3].peer_id:
            steps.append(self._group.step)
            flip(members[3], "theta", 5)
            await asyncio.sleep(1000.0)
        await audit(self, parts, within_s)

    monkeypatch.setattr(Auditing, "audit", interrupted)

    async def main() -> None:
        async with Swarm(config(min_group=3, outer_steps=6, aggregator="centered_clip")) as swarm:
            for number in range(4):
                members.append(await swarm.join(f"m{number}"))
            assert_equal_steps(await swarm.finish(), 6)
            [repaired] = members[3].of(StateFetched)
            assert ([repaired.step], repaired.num_bytes) == (steps, CHUNK_BYTES)
            assert [member.trainer.num_mismatches for member in members] == [0, 0, 0, 1]

    virtual_time.run(main(), compute_s=COST)
