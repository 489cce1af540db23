"""Exactly-once over lanes: any history of joins, leaves, crashes and part use commits each sample once, skips none."""

from __future__ import annotations

import random

import pytest
from swarm.training.inner.lease import Cursor, Lane, admitted, committed, first_lanes, lease_of, sample_ids

NUM_HISTORIES = 1500
PEERS = tuple(f"peer-{index}" for index in range(6))


class History:
    """A made-up run. `leased` are the samples that members may be using now, by interval and member."""

    def __init__(self, seed: int, num_lanes: int) -> None:
        self.random = random.Random(seed)
        self.samples = self.random.randint(1, 7)
        self.lanes = first_lanes(num_lanes - 1)
        self.lanes = admitted(self.lanes, self.some_peers())
        self.step = 1
        self.committed: list[int] = []
        self.leased: dict[tuple[int, str], list[int]] = {}
        self.begin(self.step)

    def some_peers(self) -> tuple[str, ...]:
        return tuple(sorted(self.random.sample(PEERS, self.random.randint(1, len(PEERS)))))

    def begin(self, step: int) -> None:
        """Everyone takes the leases of interval `step`, who has taken them before perhaps for the second time."""
        for peer in PEERS:
            ids = sample_ids(lease_of(self.lanes, step, peer, self.samples))
            before = self.leased.setdefault((step, peer), ids)
            assert before in (ids, []), "a lease changed while its interval ran"
            self.leased[step, peer] = ids

    def one_round(self) -> None:
        if self.random.random() < 0.1:
            # nobody had anything: the group is admitted, and all intervals start over
            self.lanes = admitted(self.lanes, self.some_peers())
            self.leased.clear()
            self.begin(self.step)
        if len(self.lanes) == 2:
            self.begin(self.step + 1)  # before this round is committed
        self.assert_disjoint()
        group, used = self.some_peers(), {}
        for peer in group:
            ids = self.leased[self.step, peer]
            if num_used := self.random.choice([0, len(ids), self.random.randint(0, len(ids))]):
                used[peer] = num_used
                self.committed += ids[:num_used]
        stay = tuple(peer for peer in group if self.random.random() < 0.9) or group
        self.lanes = committed(self.lanes, self.step, stay, self.samples, used)
        for peer in PEERS:
            del self.leased[self.step, peer]
        self.step += 1
        self.begin(self.step)

    def assert_disjoint(self) -> None:
        out = [sample for ids in self.leased.values() for sample in ids]
        assert len(set(out)) == len(out), "two members hold one sample"
        assert not set(out) & set(self.committed), "a committed sample is leased again"

    def assert_each_once(self) -> None:
        assert len(set(self.committed)) == len(self.committed) == sum(lane.cursor.num_committed for lane in self.lanes)
        ends = (
            range(index, index + len(self.lanes) * lane.cursor.next_sample, len(self.lanes))
            for index, lane in enumerate(self.lanes)
        )
        below = {sample for end in ends for sample in end}
        holes = {
            index + len(self.lanes) * own
            for index, lane in enumerate(self.lanes)
            for hole in lane.cursor.holes
            for own in hole
        }
        assert set(self.committed) == below - holes


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_any_history_commits_each_sample_once_and_skips_none(num_lanes: int) -> None:
    for seed in range(NUM_HISTORIES):
        history = History(seed, num_lanes)
        for _ in range(history.random.randint(1, 9)):
            history.one_round()
        history.assert_each_once()


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_holes_are_filled_as_soon_as_everyone_commits(num_lanes: int) -> None:
    history = History(5, num_lanes)
    for _ in range(8):
        history.one_round()
    lanes, step = admitted(history.lanes, PEERS), history.step
    while any(lane.cursor.holes for lane in lanes):
        lanes = committed(lanes, step, PEERS, history.samples, dict.fromkeys(PEERS, history.samples))
        step += 1
    assert step < history.step + 20


def test_lease_of_lanes_share_no_sample_and_leave_none_out() -> None:
    lanes = admitted(first_lanes(2), ("a", "b"))
    assert sample_ids(lease_of(lanes, 1, "a", 3)) == [0, 2, 4]
    assert sample_ids(lease_of(lanes, 1, "b", 3)) == [6, 8, 10]
    assert sample_ids(lease_of(lanes, 2, "a", 3)) == [1, 3, 5]
    assert lease_of(lanes, 3, "a", 3) == lease_of(lanes, 1, "a", 3)
    assert lease_of(lanes, 1, "stranger", 3) == ()


def test_newcomer_trains_in_the_interval_that_already_runs() -> None:
    lanes = committed(admitted(first_lanes(2), ("m", "n")), 1, ("a", "m"), 3, {"m": 3, "n": 3})
    # its own round replaces the roster; the lane of the interval that runs keeps its order, newcomers last
    assert [lane.roster for lane in lanes] == [("a", "m"), ("m", "n", "a")]
    assert sample_ids(lease_of(lanes, 2, "m", 3)) == [1, 3, 5]
    assert sample_ids(lease_of(lanes, 2, "a", 3)) == [13, 15, 17]


def test_committed_by_a_stranger_is_refused() -> None:
    with pytest.raises(ValueError, match="z has no lease"):
        committed(admitted(first_lanes(0), ("a",)), 1, ("a", "z"), 3, {"z": 1})


def test_lane_with_a_member_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Lane(cursor=Cursor(), roster=("a", "a"))
