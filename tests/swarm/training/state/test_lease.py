"""Tests that over any history of joins, leaves and crashes each sample is committed exactly once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.training.state import lease as module
from swarm.training.state.lease import (
    Cursor,
    Lease,
    LeaseStripe,
    SampleIds,
    admitted,
    advance,
    first_stripes,
    lease_of,
    leases,
    stripes_after,
)


def sample_ids(lease: Lease) -> list[int]:
    return list(SampleIds(lease))


MEMBERS = tuple(f"peer-{index}" for index in range(6))

rosters = st.sets(st.sampled_from(MEMBERS), min_size=1).map(sorted)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[str], dict[str, int | None]]:
    """Draw the members that held leases, and the share of its lease that each committed, or None for a member that
    crashed or was left out."""
    roster = draw(rosters)
    share = st.none() | st.just(100) | st.integers(0, 100)
    return roster, {member: draw(share) for member in roster}


@given(history=st.lists(rounds(), max_size=12), samples=st.integers(1, 9))
def test_advance_commits_each_sample_once_and_skips_none_over_any_history(
    history: list[tuple[list[str], dict[str, int | None]]], samples: int
) -> None:
    cursor, committed = Cursor(), []
    for roster, shares in history:
        issued = leases(cursor, tuple(roster), samples)
        used = {member: share * samples // 100 for member, share in shares.items() if share is not None}
        for member, count in used.items():
            committed += sample_ids(issued[member])[:count]
        cursor = advance(cursor, tuple(roster), samples, used)
        holes = {sample for hole in cursor.holes for sample in hole}
        assert len(set(committed)) == len(committed) == cursor.num_committed
        assert set(committed) | holes == set(range(cursor.next_sample))
    # skipped samples come first, so that a round in which everyone commits enough closes every gap
    while cursor.holes:
        issued = leases(cursor, MEMBERS, samples)
        committed += [sample for lease in issued.values() for sample in sample_ids(lease)]
        cursor = advance(cursor, MEMBERS, samples, dict.fromkeys(MEMBERS, samples))
    assert sorted(committed) == list(range(cursor.next_sample))


@given(history=st.lists(rounds(), max_size=6), samples=st.integers(1, 9), roster=rosters)
def test_leases_of_any_cursor_are_disjoint_and_full_and_unchanged_by_a_newcomer(
    history: list[tuple[list[str], dict[str, int | None]]], samples: int, roster: list[str]
) -> None:
    cursor = Cursor()
    for each, shares in history:
        cursor = advance(
            cursor, tuple(each), samples, {m: s * samples // 100 for m, s in shares.items() if s is not None}
        )
    issued = leases(cursor, tuple(roster), samples)
    with_newcomer = leases(cursor, (*roster, "newcomer"), samples)
    assert {member: with_newcomer[member] for member in roster} == issued
    assert not set(sample_ids(with_newcomer["newcomer"])) & {s for lease in issued.values() for s in sample_ids(lease)}
    drawn = [sample for lease in issued.values() for sample in sample_ids(lease)]
    assert len(set(drawn)) == len(drawn) == samples * len(roster)
    open_samples = {sample for hole in cursor.holes for sample in hole}
    assert all(sample in open_samples or sample >= cursor.next_sample for sample in drawn)


def test_advance_gives_the_same_cursor_for_members_in_any_order() -> None:
    used = {"a": 2, "b": 0, "c": 3}
    backwards = dict(reversed(used.items()))
    assert advance(Cursor(), "abc", 3, used) == advance(Cursor(), "abc", 3, backwards)
    assert advance(Cursor(), "abc", 3, used) == Cursor(next_sample=9, holes=(range(2, 6),))


def test_advance_leaves_the_cursor_unchanged_when_nobody_committed() -> None:
    cursor = Cursor(next_sample=10, holes=(range(2, 4),))
    assert advance(cursor, "ab", 5, {}) == cursor
    assert advance(cursor, "ab", 5, {"a": 0, "b": 0}) == cursor


def test_advance_moves_the_end_back_when_the_last_member_vanished() -> None:
    assert advance(Cursor(), "ab", 5, {"a": 5}) == Cursor(next_sample=5)


def test_leases_take_holes_before_fresh_samples() -> None:
    cursor = Cursor(next_sample=10, holes=(range(2, 4), range(6, 7)))
    assert leases(cursor, ("b", "a"), 4) == {
        "b": (range(2, 4), range(6, 7), range(10, 11)),
        "a": (range(11, 15),),
    }


def test_advance_refuses_a_stranger_or_too_many_samples() -> None:
    with pytest.raises(ValueError, match="z has no lease"):
        advance(Cursor(), "ab", 5, {"z": 1})
    for num_used in (-1, 6):
        with pytest.raises(ValueError, match="cannot have used"):
            advance(Cursor(), "ab", 5, {"a": num_used})


def test_leases_are_computed_once_for_all_trainers() -> None:
    roster = tuple(f"trainer {number}" for number in range(100))
    stripes = (LeaseStripe(cursor=Cursor(next_sample=977), roster=roster),)
    num_made = leases.cache_info().misses
    assert len({lease_of(stripes, 1, peer, 3) for peer in roster}) == 100
    assert leases.cache_info().misses == num_made + 1


def test_leases_of_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        leases(Cursor(), "ab", 0)


@pytest.mark.parametrize(
    "holes",
    [
        (range(5, 10),),  # it touches the end
        (range(3, 3),),
        (range(3, 2),),
        (range(-1, 2),),
        (range(1, 5, 2),),
        (range(4, 5), range(1, 2)),
        (range(1, 3), range(2, 4)),
        (range(1, 3), range(3, 4)),  # these are one hole
    ],
)
def test_cursor_refuses_impossible_holes(holes: tuple[range, ...]) -> None:
    with pytest.raises(ValueError, match="impossible hole"):
        Cursor(next_sample=10, holes=holes)


def test_cursor_refuses_a_negative_end() -> None:
    with pytest.raises(ValueError, match="-1"):
        Cursor(next_sample=-1)


NUM_HISTORIES = 1500
PEERS = tuple(f"peer-{index}" for index in range(6))


class History:
    """Simulate a run. `leased` has the samples that members may be using now, by interval and member."""

    def __init__(self, seed: int, num_stripes: int) -> None:
        self.random = random.Random(seed)
        self.samples = self.random.randint(1, 7)
        self.stripes = first_stripes(num_stripes - 1)
        self.stripes = admitted(self.stripes, self.some_peers())
        self.step = 1
        self.committed: list[int] = []
        self.leased: dict[tuple[int, str], list[int]] = {}
        self.begin(self.step)

    def some_peers(self) -> tuple[str, ...]:
        return tuple(sorted(self.random.sample(PEERS, self.random.randint(1, len(PEERS)))))

    def begin(self, step: int) -> None:
        """Have all members take their leases of interval `step`, some of them perhaps for the second time."""
        for peer in PEERS:
            ids = sample_ids(lease_of(self.stripes, step, peer, self.samples))
            before = self.leased.setdefault((step, peer), ids)
            assert before in (ids, []), "a lease changed while its interval ran"
            self.leased[step, peer] = ids

    def one_round(self) -> None:
        if self.random.random() < 0.1:
            # nobody contributed: the round only admits its group, and all intervals start over
            self.stripes = admitted(self.stripes, self.some_peers())
            self.leased.clear()
            self.begin(self.step)
        if len(self.stripes) == 2:
            self.begin(self.step + 1)  # the next interval begins before this round is committed
        self.assert_disjoint()
        group, used = self.some_peers(), {}
        for peer in group:
            ids = self.leased[self.step, peer]
            if num_used := self.random.choice([0, len(ids), self.random.randint(0, len(ids))]):
                used[peer] = num_used
                self.committed += ids[:num_used]
        stay = tuple(peer for peer in group if self.random.random() < 0.9) or group
        self.stripes = stripes_after(self.stripes, self.step, stay, self.samples, used)
        for peer in PEERS:
            del self.leased[self.step, peer]
        self.step += 1
        self.begin(self.step)

    def assert_disjoint(self) -> None:
        out = [sample for ids in self.leased.values() for sample in ids]
        assert len(set(out)) == len(out), "two members hold one sample"
        assert not set(out) & set(self.committed), "a committed sample is leased again"

    def assert_each_once(self) -> None:
        assert (
            len(set(self.committed))
            == len(self.committed)
            == sum(stripe.cursor.num_committed for stripe in self.stripes)
        )
        ends = (
            range(index, index + len(self.stripes) * stripe.cursor.next_sample, len(self.stripes))
            for index, stripe in enumerate(self.stripes)
        )
        below = {sample for end in ends for sample in end}
        holes = {
            index + len(self.stripes) * own
            for index, stripe in enumerate(self.stripes)
            for hole in stripe.cursor.holes
            for own in hole
        }
        assert set(self.committed) == below - holes


def test_each_sample_is_committed_once_and_none_skipped_over_any_history_of_two_stripes() -> None:
    for seed in range(NUM_HISTORIES):
        history = History(seed, 2)
        for _ in range(history.random.randint(1, 9)):
            history.one_round()
        history.assert_each_once()


@pytest.mark.parametrize("num_stripes", [1, 2])
def test_holes_are_filled_once_everyone_commits(num_stripes: int) -> None:
    history = History(5, num_stripes)
    for _ in range(8):
        history.one_round()
    stripes, step = admitted(history.stripes, PEERS), history.step
    while any(stripe.cursor.holes for stripe in stripes):
        stripes = stripes_after(stripes, step, PEERS, history.samples, dict.fromkeys(PEERS, history.samples))
        step += 1
    assert step < history.step + 20


def test_lease_stripes_share_no_sample_and_leave_none_out() -> None:
    stripes = admitted(first_stripes(2), ("a", "b"))
    assert sample_ids(lease_of(stripes, 1, "a", 3)) == [0, 2, 4]
    assert sample_ids(lease_of(stripes, 1, "b", 3)) == [6, 8, 10]
    assert sample_ids(lease_of(stripes, 2, "a", 3)) == [1, 3, 5]
    assert lease_of(stripes, 3, "a", 3) == lease_of(stripes, 1, "a", 3)
    assert lease_of(stripes, 1, "stranger", 3) == ()


def test_newcomer_gets_a_lease_in_the_running_interval() -> None:
    stripes = stripes_after(admitted(first_stripes(2), ("m", "n")), 1, ("a", "m"), 3, {"m": 3, "n": 3})
    # its own round replaces the roster, and the running interval's stripe keeps its order with newcomers at the end
    assert [stripe.roster for stripe in stripes] == [("a", "m"), ("m", "n", "a")]
    assert sample_ids(lease_of(stripes, 2, "m", 3)) == [1, 3, 5]
    assert sample_ids(lease_of(stripes, 2, "a", 3)) == [13, 15, 17]


def test_committed_by_a_stranger_is_refused() -> None:
    with pytest.raises(ValueError, match="z has no lease"):
        stripes_after(admitted(first_stripes(0), ("a",)), 1, ("a", "z"), 3, {"z": 1})


def test_lease_stripe_with_a_member_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        LeaseStripe(cursor=Cursor(), roster=("a", "a"))


@given(
    lease=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(1, 2)), max_size=4),
    start=st.integers(-30, 30),
    stop=st.integers(-30, 30),
)
def test_sample_ids_slice_like_a_list(lease: list[tuple[int, int, int]], start: int, stop: int) -> None:
    parts = tuple(range(first, first + step * count, step) for first, count, step in lease)
    ids, known = SampleIds(parts), sample_ids(parts)
    assert len(ids) == len(known)
    assert list(ids[start:stop]) == known[start:stop]
    assert [ids[index] for index in range(-len(known), len(known))] == known * 2
    with pytest.raises(IndexError):
        ids[len(known)]


def test_sample_ids_of_the_longest_interval_need_no_memory() -> None:
    """An interval that ends by the clock uses only a small part of them."""
    longest = 100_000 << 16
    rest = SampleIds((range(5), range(9, 9 + longest)))[3:]
    assert len(rest) == longest + 2
    assert list(rest[1:4]) == [4, 9, 10]


def test_holes_are_bounded_and_no_sample_is_committed_twice_when_leases_are_hardly_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round moves the borders of these leases, and leaves about one more hole for each member."""
    monkeypatch.setattr(module, "MAX_HOLES", 20)
    cursor, members, committed, draw = Cursor(), ("a", "b", "c", "d"), set[int](), random.Random(1)
    for _ in range(60):
        used = {member: draw.randint(1, 3) for member in members}
        for member, parts in leases(cursor, members, 200).items():
            taken = sample_ids(parts)[: used[member]]
            assert len(taken) == used[member]
            assert committed.isdisjoint(taken)
            committed.update(taken)
        cursor = advance(cursor, members, 200, used)
        assert len(cursor.holes) <= 20
    assert len(cursor.holes) == 20
