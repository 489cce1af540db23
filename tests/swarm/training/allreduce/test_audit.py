"""Tests which parts and leaves a member audits, and how many bytes its audits take."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from swarm.training.allreduce.leaf_checks import BYTES_SHARE, LEAST_BYTES, audit_plan, draw_audited_leaves
from swarm.training.allreduce.parts import leaf_values, num_leaves, part_leaves, part_values
from swarm_compression import get_codec
from swarm_protocol import limits
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group

CODEC = get_codec("int8")
PEERS = sorted(Identity(bytes([number]) * 32).peer_id for number in range(1, 65))


def group(num_members: int, num_values: int) -> Group:
    return Group(
        run="run",
        step=1,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1) for peer in PEERS[:num_members]),
        part_values=part_values(num_values, (1.0,) * num_members),
        reduce_s=10.0,
        vote_s=10.0,
    )


@pytest.mark.parametrize(
    ("num_members", "num_values", "num_parts"),
    [(2, 3000, 1), (4, 3000, 3), (5, 10_000_000, 4), (8, 10_000_000, 7), (8, 1_100_000, 4), (16, 1_000_000_000, 13)],
)
def test_plan_covers_as_many_parts_as_its_byte_budget_allows(num_members: int, num_values: int, num_parts: int) -> None:
    whole = group(num_members, num_values)
    plan = audit_plan(whole, PEERS[0], CODEC, random.Random(0))
    assert len(plan) == num_parts
    assert 0 not in plan
    assert all(1 <= count <= limits.MAX_DRAWS for count in plan.values())
    proof_bytes = limits.DIGEST_BYTES * (num_leaves(num_values) - 1).bit_length()
    num_bytes = sum(plan.values()) * num_members * (CODEC.encoded_bytes(leaf_values(num_values)) + proof_bytes)
    assert num_bytes <= max(LEAST_BYTES, BYTES_SHARE * 2 * CODEC.encoded_bytes(num_values))


def test_plan_covers_each_part_about_equally_often_when_group_is_large() -> None:
    whole, chance = group(16, 10_000_000), random.Random(0)
    counts = Counter(part for _ in range(1500) for part in audit_plan(whole, PEERS[3], CODEC, chance))
    assert set(counts) == set(range(16)) - {3}
    assert max(counts.values()) < 1.5 * min(counts.values())


def test_plan_skips_parts_without_values() -> None:
    assert audit_plan(group(5, 300), PEERS[4], CODEC, random.Random(0)).keys() <= {0, 1, 2, 3}
    assert all(group(5, 300).part_values[part] for part in audit_plan(group(5, 300), PEERS[4], CODEC, random.Random(0)))


def share_drawn(sizes: list[float], leaf: int) -> float:
    chance = random.Random(0)
    return sum(leaf in draw_audited_leaves(sizes, 1, chance) for _ in range(4000)) / 4000


def test_draws_prefer_leaves_with_large_results_and_reach_all_others() -> None:
    assert share_drawn([1.0] * 200, 7) == pytest.approx(1 / 200, abs=0.004)
    assert share_drawn([10.0, *[1.0] * 199], 0) == pytest.approx(0.17, abs=0.03)
    assert share_drawn([1000.0, *[1.0] * 199], 0) == pytest.approx(0.9, abs=0.02)
    assert share_drawn([float("inf"), *[1.0] * 9], 0) > 0.85
    assert share_drawn([1000.0, *[0.0] * 9], 3) > 0.005
    assert share_drawn([0.0] * 4, 2) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("num_draws", [1, 2, 5, 8, 20])
def test_draws_are_distinct_and_at_most_one_for_each_leaf(num_draws: int) -> None:
    for seed in range(50):
        drawn = draw_audited_leaves([0.0, 3.0, 0.0, 1.0, 0.0], num_draws, random.Random(seed))
        assert len(drawn) == len(set(drawn)) == min(num_draws, 5)
        assert set(drawn) <= set(range(5))


@pytest.mark.parametrize("num_values", [1, 255, 3000, 262_145, 10_000_000, 300_000_000])
def test_leaves_of_all_parts_together_are_the_leaves_of_the_vector(num_values: int) -> None:
    for num_members in (1, 3, 16):
        whole = group(num_members, num_values)
        leaves = [leaf for part in range(num_members) for leaf in part_leaves(whole, part)]
        assert leaves == list(range(num_leaves(num_values)))
