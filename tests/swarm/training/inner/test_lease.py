"""Exactly-once: over any history of joins, leaves and crashes, each sample is committed once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm.training.inner.lease import Cursor, advance, leases, sample_ids

MEMBERS = [f"peer-{index}" for index in range(6)]

rosters = st.sets(st.sampled_from(MEMBERS), min_size=1).map(sorted)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[str], dict[str, int | None]]:
    """Who held leases, and the share of it that each committed; None: it crashed, or was left out."""
    roster = draw(rosters)
    share = st.none() | st.just(100) | st.integers(0, 100)
    return roster, {member: draw(share) for member in roster}


@settings(max_examples=2000)
@given(history=st.lists(rounds(), max_size=12), samples=st.integers(1, 9))
def test_advance_any_history_commits_each_sample_once_and_skips_none(
    history: list[tuple[list[str], dict[str, int | None]]], samples: int
) -> None:
    cursor, committed = Cursor(), []
    for roster, shares in history:
        issued = leases(cursor, roster, samples)
        used = {member: share * samples // 100 for member, share in shares.items() if share is not None}
        for member, count in used.items():
            committed += sample_ids(issued[member])[:count]
        cursor = advance(cursor, roster, samples, used)
        holes = {sample for hole in cursor.holes for sample in hole}
        assert len(set(committed)) == len(committed) == cursor.num_committed
        assert set(committed) | holes == set(range(cursor.next_sample))
    # whatever was left over comes first, so a round in which everyone commits enough closes every gap
    while cursor.holes:
        issued = leases(cursor, MEMBERS, samples)
        committed += [sample for lease in issued.values() for sample in sample_ids(lease)]
        cursor = advance(cursor, MEMBERS, samples, dict.fromkeys(MEMBERS, samples))
    assert sorted(committed) == list(range(cursor.next_sample))


@given(history=st.lists(rounds(), max_size=6), samples=st.integers(1, 9), roster=rosters)
def test_leases_of_any_cursor_are_disjoint_full_and_stay_when_another_member_comes(
    history: list[tuple[list[str], dict[str, int | None]]], samples: int, roster: list[str]
) -> None:
    cursor = Cursor()
    for each, shares in history:
        cursor = advance(cursor, each, samples, {m: s * samples // 100 for m, s in shares.items() if s is not None})
    issued = leases(cursor, roster, samples)
    with_newcomer = leases(cursor, [*roster, "newcomer"], samples)
    assert {member: with_newcomer[member] for member in roster} == issued
    assert not set(sample_ids(with_newcomer["newcomer"])) & {s for lease in issued.values() for s in sample_ids(lease)}
    drawn = [sample for lease in issued.values() for sample in sample_ids(lease)]
    assert len(set(drawn)) == len(drawn) == samples * len(roster)
    open_samples = {sample for hole in cursor.holes for sample in hole}
    assert all(sample in open_samples or sample >= cursor.next_sample for sample in drawn)


def test_advance_members_used_in_any_order_gives_the_same_cursor() -> None:
    used = {"a": 2, "b": 0, "c": 3}
    backwards = dict(reversed(used.items()))
    assert advance(Cursor(), "abc", 3, used) == advance(Cursor(), "abc", 3, backwards)
    assert advance(Cursor(), "abc", 3, used) == Cursor(next_sample=9, holes=(range(2, 6),))


def test_advance_nobody_committed_leaves_the_cursor() -> None:
    cursor = Cursor(next_sample=10, holes=(range(2, 4),))
    assert advance(cursor, "ab", 5, {}) == cursor
    assert advance(cursor, "ab", 5, {"a": 0, "b": 0}) == cursor


def test_advance_the_last_member_vanished_moves_the_end_back() -> None:
    assert advance(Cursor(), "ab", 5, {"a": 5}) == Cursor(next_sample=5)


def test_leases_holes_come_before_fresh_samples() -> None:
    cursor = Cursor(next_sample=10, holes=(range(2, 4), range(6, 7)))
    assert leases(cursor, ["b", "a"], 4) == {
        "b": (range(2, 4), range(6, 7), range(10, 11)),
        "a": (range(11, 15),),
    }


def test_advance_stranger_or_too_many_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="z has no lease"):
        advance(Cursor(), "ab", 5, {"z": 1})
    for num_used in (-1, 6):
        with pytest.raises(ValueError, match="cannot have used"):
            advance(Cursor(), "ab", 5, {"a": num_used})


def test_leases_of_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        leases(Cursor(), "ab", 0)


@pytest.mark.parametrize(
    "holes",
    [
        (range(5, 10),),  # touches the end
        (range(3, 3),),
        (range(3, 2),),
        (range(-1, 2),),
        (range(1, 5, 2),),
        (range(4, 5), range(1, 2)),
        (range(1, 3), range(2, 4)),
        (range(1, 3), range(3, 4)),  # are one
    ],
)
def test_cursor_impossible_holes_are_refused(holes: tuple[range, ...]) -> None:
    with pytest.raises(ValueError, match="impossible hole"):
        Cursor(next_sample=10, holes=holes)


def test_cursor_negative_end_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Cursor(next_sample=-1)
