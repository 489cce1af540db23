"""Counting votes: pure."""

from __future__ import annotations

import pytest
from swarm.training.vote import disagreement, quorum, tally
from swarm_protocol.training_messages import Outcome, Vote

MEMBERS = ("a", "b", "c", "d")


def vote(state: bytes = b"s", parts: tuple[bytes, ...] = ()) -> Vote:
    outcome = Outcome(origin_digest=bytes(32), part_digests=tuple(part * 32 for part in parts), state_digest=state * 32)
    return Vote(run="run", step=1, attempt=0, group_digest=bytes(32), outcome=outcome)


@pytest.mark.parametrize(("members", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (8, 6), (256, 171)])
def test_quorum_is_two_thirds_rounded_up(members: int, needed: int) -> None:
    assert quorum(members) == needed


def test_quorum_leaves_no_room_for_a_second_one_with_fewer_than_a_third_twice() -> None:
    for num_members in range(1, 257):
        assert 2 * quorum(num_members) - num_members >= num_members / 3


def test_tally_with_two_thirds_for_one_outcome_decides_it() -> None:
    result = tally(MEMBERS, {"a": vote(), "b": vote(), "c": vote()}, ())
    assert result.decided == vote().outcome


def test_tally_with_too_few_votes_waits_until_too_many_are_silent() -> None:
    votes = {"a": vote(), "b": vote()}
    assert not tally(MEMBERS, votes, ("c",)).hopeless
    assert tally(MEMBERS, votes, ("c", "d")).hopeless


def test_tally_of_split_votes_is_hopeless_and_says_so() -> None:
    votes = {"a": vote(b"1"), "b": vote(b"1"), "c": vote(b"2"), "d": vote(b"2")}
    result = tally(MEMBERS, votes, ())
    assert result.hopeless
    assert "2 different outcomes" in result.reason


def test_disagreement_over_a_part_blames_its_owner() -> None:
    mine = vote(parts=(b"1", b"2")).outcome
    assert disagreement(mine, {"c": vote(b"x", parts=(b"1", b"9"))}, ("a", "b")) == ("b",)


def test_disagreement_over_the_state_alone_blames_the_voter() -> None:
    mine = vote(parts=(b"1", b"2")).outcome
    assert disagreement(mine, {"c": vote(b"x", parts=(b"1", b"2"))}, ("a", "b")) == ("c",)
