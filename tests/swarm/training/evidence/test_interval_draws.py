"""Tests that the drawn validations follow from the outcome, match the run's rate, and leave members that train."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from statistics import mean

import pytest
from support.wrong_reduction import reduced
from swarm.training.allreduce.parts import part_leaves
from swarm.training.evidence.wrong_interval import draw_leaves, draw_validators
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.training_messages import Follower

GROUP = reduced().group
PEERS = GROUP.peer_ids


def outcome(number: int) -> Outcome:
    digest = hashlib.sha256(str(number).encode()).digest()
    return Outcome(origin_digest=bytes(32), part_digests=(digest,) * len(PEERS), state_digest=bytes(32))


def test_each_member_is_drawn_at_the_runs_rate_and_never_as_its_own_validator() -> None:
    drawn = [draw_validators(GROUP, outcome(number), 0.05) for number in range(6000)]
    for peer in PEERS:
        assert mean(peer in each for each in drawn) == pytest.approx(0.05, abs=0.01)
    assert all(member != validator for each in drawn for member, validator in each.items())
    by = [validator for each in drawn for validator in each.values()]
    assert all(by.count(peer) / len(by) == pytest.approx(0.25, abs=0.05) for peer in PEERS)


def test_liar_is_drawn_in_20_rounds_in_expectation_at_a_rate_of_5_percent() -> None:
    """The first validator that is drawn for a wrong delta finds it."""

    def rounds_until(peer: str, seed: int) -> int:
        number = 0
        while peer not in draw_validators(GROUP, outcome(seed * 10**6 + number), 0.05):
            number += 1
        return number + 1

    found = [rounds_until(PEERS[2], seed) for seed in range(400)]
    assert mean(found) == pytest.approx(20, abs=3)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_at_most_half_of_the_members_validate_each_one_interval(rate: float) -> None:
    for number in range(300):
        drawn = draw_validators(GROUP, outcome(number), rate)
        assert len(drawn) <= len(PEERS) // 2
        assert len(set(drawn.values())) == len(drawn)


def test_no_interval_is_drawn_in_runs_without_validation_or_rounds_without_parts() -> None:
    assert draw_validators(GROUP, outcome(1), 0.0) == {}
    idle = tuple(replace(each, num_tokens=0, num_samples=0) for each in GROUP.members)
    assert draw_validators(replace(GROUP, members=idle, part_values=()), outcome(1), 0.5) == {}


def test_head_with_followers_may_validate_and_is_never_validated() -> None:
    head = replace(GROUP.members[0], followers=(Follower(place=0, num_tokens=1, num_samples=1),), num_samples=2)
    group = replace(GROUP, members=(head, *GROUP.members[1:]))
    drawn = [draw_validators(group, outcome(number), 0.5) for number in range(300)]
    assert not any(head.peer_id in each for each in drawn)
    assert any(head.peer_id in each.values() for each in drawn)


def test_validated_leaves_lie_in_the_validators_part_and_follow_from_the_outcome() -> None:
    for number in range(20):
        leaves = draw_leaves(GROUP, outcome(number), PEERS[0], PEERS[2])
        assert set(leaves) <= set(part_leaves(GROUP, 2))
        assert 0 < len(leaves) == len(set(leaves)) <= 16
        assert leaves == draw_leaves(GROUP, outcome(number), PEERS[0], PEERS[2])
