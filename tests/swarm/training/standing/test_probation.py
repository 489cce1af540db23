"""Tests the rule of probation alone: weights, seats, and which members have proven themselves after a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.training.run.run_config import RunConfig
from swarm.training.standing.entrance import Probation
from swarm.training.standing.standings import TrainerStandings
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Follower, Group

PEERS = sorted(Identity(bytes([number]) * 32).peer_id for number in range(40))
RULE = Probation(steps=4, share=0.25)


def member(place: int, tokens: int, left: int = 0, *followers: Follower) -> Contribution:
    total = tokens + sum(each.num_tokens for each in followers)
    return Contribution(
        peer_id=PEERS[place], num_tokens=total, num_samples=total, steps_left=left, followers=tuple(followers)
    )


def test_weight_grows_with_the_steps_that_a_member_has_contributed_to() -> None:
    proven = [member(place, 1000) for place in range(4)]
    assert [RULE.weights([*proven, member(9, 1000, left)])[-1] for left in (4, 3, 2, 1, 0)] == [
        200,
        400,
        600,
        800,
        1000,
    ]
    assert RULE.weights(proven) == [1000] * 4


@given(
    proven=st.lists(st.integers(1, 10**9), min_size=1, max_size=8),
    fresh=st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 4)), max_size=16),
    share=st.sampled_from([0.01, 0.1, 0.25, 0.5]),
)
def test_members_on_probation_together_have_at_most_the_runs_share_of_the_weight(
    proven: list[int], fresh: list[tuple[int, int]], share: float
) -> None:
    members = [member(place, tokens) for place, tokens in enumerate(proven)]
    members += [member(len(proven) + place, tokens, left) for place, (tokens, left) in enumerate(fresh)]
    weights = Probation(steps=4, share=share).weights(members)
    assert weights[: len(proven)] == proven
    assert all(weight >= 1 for weight in weights)
    # each counts at least one token
    assert sum(weights[len(proven) :]) <= share * sum(weights) + len(fresh)


def test_head_brings_only_the_share_of_followers_on_probation_that_its_proven_ones_allow() -> None:
    fresh = [Follower(place=place, num_tokens=1000, num_samples=1000, steps_left=1) for place in range(7)]
    head, other = member(0, 1000, 0, *fresh), member(1, 1000)
    assert RULE.weights([head, other]) == [1000 + 333, 1000]
    assert RULE.weights([member(0, 1000, 0, Follower(place=9, num_tokens=500, num_samples=5)), other]) == [1500, 1000]


def test_run_without_probation_weighs_members_by_tokens() -> None:
    assert Probation().weights([member(0, 5), member(1, 7, 3)]) == [5, 7]
    assert Probation().num_seats(16, 2) == 16


@pytest.mark.parametrize(("num_proven", "num_seats"), [(0, 1), (2, 1), (4, 2), (6, 3), (8, 4), (12, 4)])
def test_members_on_probation_get_a_quarter_of_a_full_group_and_a_third_of_a_small_one(
    num_proven: int, num_seats: int
) -> None:
    assert RULE.num_seats(16, num_proven) == num_seats


def test_probation_is_no_longer_than_the_steps_that_the_run_has_made() -> None:
    new = PEERS[0]
    assert [TrainerStandings(rule=RULE, outer_step=step).steps_left(new) for step in (0, 1, 3, 100)] == [0, 1, 3, 4]
    known = TrainerStandings(rule=RULE, known=PEERS[:2], left={PEERS[1]: 2}, outer_step=100)
    assert [known.steps_left(peer) for peer in PEERS[:3]] == [0, 2, 4]
    assert known.after(PEERS[:3], PEERS[1:2]) == ((PEERS[1], 1), (PEERS[2], 4))
    assert (
        TrainerStandings(rule=RULE, known=PEERS[:2], left={PEERS[1]: 1}, outer_step=9).after(PEERS[:2], PEERS[:2]) == ()
    )


def test_roster_and_deciding_votes_are_of_proven_members_only() -> None:
    members = (member(0, 5), member(1, 5, 1), member(2, 5, 2), Contribution(peer_id=PEERS[3], steps_left=1))
    group = Group(
        run="run",
        step=1,
        attempt=0,
        state_digest=bytes(32),
        members=members,
        part_values=(1,) * 4,
        reduce_s=1.0,
        vote_s=1.0,
    )
    assert group.deciding == tuple(PEERS[:1])
    assert group.roster == tuple(PEERS[:2]), "a member counts once it has contributed to its last step on probation"
    assert group.on_probation == tuple(PEERS[1:4])


def test_peers_that_a_run_admits_by_name_have_no_probation() -> None:
    assert RunConfig(name="x").probation.steps == 4
    assert RunConfig(name="x", admission=tuple(PEERS[:2])).probation.steps == 0
