"""Tests how reported effects become scores: a third of liars cannot move a score beyond the honest members'
findings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.training.standing.held_out_scores import (
    LEAST_MEASURED,
    MEMORY,
    HeldOutRule,
    HeldOutScore,
    HeldOutScores,
    discounted_weights,
    middle,
)
from swarm_protocol import limits
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group

PEERS = tuple(sorted(Identity(bytes([index]) * 32).peer_id for index in range(10)))
EFFECTS = st.integers(-limits.MAX_EFFECT, limits.MAX_EFFECT)


def group_of(members: tuple[Contribution, ...]) -> Group:
    return Group(
        run="run",
        step=3,
        attempt=0,
        state_digest=bytes(32),
        members=members,
        part_values=(10,) * len(members),
        reduce_s=1.0,
        vote_s=1.0,
    )


def reports(*effects: int, drawn: str = PEERS[0]) -> Group:
    """Return the reports of the other members about `drawn`, in the order of their peer ids."""
    others = [peer for peer in PEERS[: len(effects) + 1] if peer != drawn]
    told = {drawn: (limits.MAX_EFFECT,)} | {peer: (effect,) for peer, effect in zip(others, effects, strict=True)}
    return group_of(
        tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1, effects=told[peer]) for peer in sorted(told))
    )


@given(st.lists(EFFECTS, min_size=6, max_size=9), st.lists(EFFECTS, min_size=3, max_size=3))
def test_effect_lies_between_honest_reports_when_fewer_than_a_third_lie(honest: list[int], lies: list[int]) -> None:
    lies = lies[: (len(honest) - 1) // 2]
    found = HeldOutScores(drawn=PEERS[:1]).effects(reports(*(honest + lies)[:9]))
    # the effect is zero if honest members disagree on its sign, or if liars make it seem so
    assert min(0, *honest) <= found[PEERS[0]] <= max(0, *honest)
    if min(honest) > 0:
        assert found[PEERS[0]] >= min(honest)
    if max(honest) < 0:
        assert found[PEERS[0]] <= max(honest)


def test_effect_counts_only_when_more_than_two_thirds_of_the_others_measured_it() -> None:
    scores = HeldOutScores(drawn=PEERS[:1])
    group = reports(5, 5, 5, 5, 5, 5)
    for num_silent, is_counted in ((0, True), (1, True), (2, False)):
        silent = group.peer_ids[1 : 1 + num_silent]
        members = tuple(replace(each, effects=()) if each.peer_id in silent else each for each in group.members)
        assert scores.effects(replace(group, members=members)) == ({PEERS[0]: 5} if is_counted else {})


def test_reports_of_members_on_probation_and_of_the_measured_member_do_not_count() -> None:
    group = reports(7, 7, 7, -1, -1)
    members = tuple(replace(each, steps_left=2) if each.effects == (-1,) else each for each in group.members)
    assert HeldOutScores(drawn=PEERS[:1]).effects(replace(group, members=members)) == {PEERS[0]: 7}


def test_score_is_a_slow_integer_average_and_is_dropped_with_its_trainer() -> None:
    scores = HeldOutScores(drawn=PEERS[:1])
    (first,) = scores.after(PEERS, reports(100, 100, 100))
    assert first == HeldOutScore(peer_id=PEERS[0], value=100, num_measured=1)
    (second,) = replace(scores, scores=(first,)).after(PEERS, reports(-100, -100, -100))
    assert (second.value, second.num_measured) == (0, 2)
    settled = HeldOutScore(peer_id=PEERS[0], value=80, num_measured=MEMORY)
    assert settled.with_effect(0) == replace(settled, value=70)
    assert replace(scores, scores=(first,)).after(PEERS[1:], reports(1, 1, 1)) == ()


def test_each_step_draws_contributors_by_an_unpredictable_beacon() -> None:
    group = reports(*[0] * 9)
    rule = HeldOutRule(num_drawn=2)
    draws = [rule.draw(group, (bytes([index]) * 32,)) for index in range(200)]
    assert all(len(set(each)) == 2 for each in draws)
    counts = {peer: sum(peer in each for each in draws) for peer in PEERS}
    assert min(counts.values()) > 15, "each contributor is drawn in about a fifth of the steps"
    assert draws[0] == rule.draw(group, (bytes(32),))
    assert HeldOutRule().draw(group, (bytes(32),)) == ()


@pytest.mark.parametrize(
    ("value", "num_measured", "is_discounted"),
    [(10, MEMORY, True), (11, MEMORY, False), (-500, LEAST_MEASURED, True), (-500, LEAST_MEASURED - 1, False)],
)
def test_low_score_discounts_only_after_enough_measurements(
    value: int, num_measured: int, *, is_discounted: bool
) -> None:
    others = tuple(HeldOutScore(peer_id=peer, value=100, num_measured=MEMORY) for peer in PEERS[1:4])
    one = HeldOutScore(peer_id=PEERS[0], value=value, num_measured=num_measured)
    scores = HeldOutScores(rule=HeldOutRule(num_drawn=1, discounts=True), scores=(one, *others))
    assert scores.is_discounted(PEERS[0]) is is_discounted
    assert not any(map(scores.is_discounted, PEERS[1:]))
    assert not replace(scores, rule=HeldOutRule(num_drawn=1)).is_discounted(PEERS[0]), (
        "a run without discounts discounts nobody"
    )


def test_nobody_is_discounted_when_the_median_score_is_not_positive() -> None:
    low = tuple(HeldOutScore(peer_id=peer, value=-index, num_measured=MEMORY) for index, peer in enumerate(PEERS[:5]))
    scores = HeldOutScores(rule=HeldOutRule(num_drawn=1, discounts=True), scores=low)
    assert not any(map(scores.is_discounted, PEERS))


def test_median_of_two_is_the_one_nearer_to_zero_or_zero_when_signs_differ() -> None:
    assert [middle(each) for each in ([3], [3, 1], [-3, -1], [-1, 4], [1, 2, 9])] == [3, 1, -1, 0, 2]


def test_discounted_contribution_keeps_a_tenth_and_at_least_one_token() -> None:
    members = [
        Contribution(peer_id=peer, num_tokens=1, num_samples=1, discounted=index != 1)
        for index, peer in enumerate(PEERS[:4])
    ]
    assert discounted_weights(members, [1000, 1000, 5, 0]) == [100, 1000, 1, 0]
