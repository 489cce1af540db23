"""Tests how votes are counted, without a network."""

from __future__ import annotations

from itertools import combinations

import pytest
from swarm.training.round.quorum import Succession, disagreement, quorum, tally
from swarm_protocol.commit_messages import Outcome, Vote

MEMBERS = ("a", "b", "c", "d")


def vote(state: bytes = b"s", parts: tuple[bytes, ...] = ()) -> Vote:
    outcome = Outcome(origin_digest=bytes(32), part_digests=tuple(part * 32 for part in parts), state_digest=state * 32)
    return Vote(
        run="run", step=1, attempt=0, group_digest=bytes(32), outcome=outcome, kind="commit", state_digest=bytes(32)
    )


@pytest.mark.parametrize(("members", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (8, 6), (256, 171)])
def test_quorum_is_two_thirds_rounded_up(members: int, needed: int) -> None:
    assert quorum(members) == needed


def test_two_quorums_share_at_least_a_third_of_the_members() -> None:
    for num_members in range(1, 257):
        assert 2 * quorum(num_members) - num_members >= num_members / 3


def test_tally_decides_an_outcome_with_two_thirds_of_the_votes() -> None:
    result = tally(MEMBERS, {"a": vote(), "b": vote(), "c": vote()}, ())
    assert result.decided == vote().outcome


def test_tally_waits_with_too_few_votes_until_too_many_members_are_silent() -> None:
    votes = {"a": vote(), "b": vote()}
    assert not tally(MEMBERS, votes, ("c",)).hopeless
    assert tally(MEMBERS, votes, ("c", "d")).hopeless


def test_tally_of_split_votes_is_hopeless_and_has_a_reason() -> None:
    votes = {"a": vote(b"1"), "b": vote(b"1"), "c": vote(b"2"), "d": vote(b"2")}
    result = tally(MEMBERS, votes, ())
    assert result.hopeless
    assert "2 different outcomes" in result.reason


@pytest.mark.parametrize(
    ("num_members", "min_group", "needed"),
    [(0, 2, 0), (1, 2, 1), (2, 2, 2), (3, 2, 2), (4, 2, 3), (16, 2, 11), (0, 1, 0), (16, 1, 1)],
)
def test_succession_needs_two_thirds_of_the_former_members_unless_one_may_go_on_alone(
    num_members: int, min_group: int, needed: int
) -> None:
    roster, rule = [f"m{index:02}" for index in range(num_members)], Succession(min_group=min_group)
    assert rule.num_usual(roster) == needed
    assert rule.is_usual(roster, roster[:needed])
    assert rule.is_enough(roster, roster[:needed])
    if needed:
        assert not rule.is_usual(roster, [*roster[: needed - 1], "stranger", "another"])
        assert not rule.is_enough(roster, [*roster[: needed - 1], "stranger", "another"])


MAJORITY = Succession(min_group=2, majority_after_s=1.0)


@pytest.mark.parametrize(
    ("voters", "is_enough"), [("abc", True), ("bcd", True), ("ab", True), ("ad", True), ("bc", False), ("cd", False)]
)
def test_succession_by_majority_needs_more_than_half_or_half_with_the_first_member(
    voters: str, is_enough: bool
) -> None:
    assert MAJORITY.is_enough("abcd", voters) == is_enough
    assert MAJORITY.is_usual("abcd", voters) == (len(voters) == 3)


@pytest.mark.parametrize("rule", [MAJORITY, Succession(min_group=2)], ids=["majority", "two thirds"])
@pytest.mark.parametrize("num_members", range(1, 9))
def test_any_two_sufficient_sets_of_voters_share_a_member(num_members: int, rule: Succession) -> None:
    roster = "abcdefgh"[:num_members]
    subsets = [set(each) for size in range(num_members + 1) for each in combinations(roster, size)]
    enough = [each for each in subsets if rule.is_enough(roster, each)]
    assert enough
    assert all(one & other for one in enough for other in enough)


@pytest.mark.parametrize(
    ("succession", "words"),
    [
        (Succession(min_group=2), "two thirds decide: safe against crashes, partitions, and fewer"),
        (Succession(min_group=2, majority_after_s=60), "after 60 s a majority: safe against crashes and"),
        (Succession(min_group=1), "any one member may go on alone"),
    ],
)
def test_succession_describes_which_losses_it_withstands(succession: Succession, words: str) -> None:
    assert words in succession.in_words


PARTS = (b"1", b"2", b"3", b"4")
MINE = vote(parts=PARTS).outcome


def test_disagreement_of_more_than_a_third_about_a_part_is_about_its_owner() -> None:
    other = vote(b"x", parts=(b"1", b"9", b"3", b"4"))
    assert disagreement(MINE, {"c": other, "d": other}, MEMBERS, MEMBERS) == ("b",)


def test_disagreement_of_members_without_a_deciding_vote_is_about_these() -> None:
    other = vote(b"x", parts=(b"1", b"9", b"3", b"4"))
    assert disagreement(MINE, {"c": other, "d": other}, MEMBERS, ("a", "b")) == ("c", "d")


def test_disagreement_of_one_member_about_parts_of_others_is_about_that_member() -> None:
    votes = {"b": vote(parts=PARTS), "d": vote(b"x", parts=(b"9",) * 4)}
    assert disagreement(MINE, votes, MEMBERS, MEMBERS) == ("d",)


def test_disagreement_about_the_state_alone_is_about_the_minority() -> None:
    other, mine = vote(b"x", parts=PARTS), vote(parts=PARTS)
    assert disagreement(MINE, {"a": mine, "b": mine, "c": other}, MEMBERS, MEMBERS) == ("c",)
    assert disagreement(MINE, {"a": mine, "b": other, "c": other}, MEMBERS, MEMBERS) == ()


def test_disagreement_of_equal_halves_about_the_state_alone_is_about_nobody() -> None:
    assert disagreement(MINE, {"a": vote(parts=PARTS), "c": vote(b"x", parts=PARTS)}, MEMBERS, MEMBERS) == ()
