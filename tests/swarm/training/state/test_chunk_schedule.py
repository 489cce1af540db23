"""Which donor is asked for which chunk, and when: pure, so time is a number."""

from __future__ import annotations

from swarm.training.state.replica_state import CHUNK_BYTES
from swarm.training.state.state_download import ASSUMED_S, MAX_BYTES, MAX_DONOR_BYTES, ChunkSchedule


def asked(schedule: ChunkSchedule, now: float = 0.0) -> list[tuple[str, int]]:
    """All that is to be asked now."""
    return list(iter(lambda: schedule.next(now), None))  # type: ignore[arg-type]


def test_schedule_asks_each_donor_for_one_chunk_at_first() -> None:
    assert asked(ChunkSchedule(range(10), ["a", "b", "c"])) == [("a", 0), ("b", 1), ("c", 2)]


def test_schedule_fills_a_fast_donors_link_and_leaves_a_slow_one_its_chunk() -> None:
    schedule = ChunkSchedule(range(100), ["fast", "slow"])
    asked(schedule)
    schedule.came("fast", 0, 0.25)
    assert asked(schedule, 0.25) == [("fast", index) for index in range(2, 7)], "four a second, and one ahead"
    schedule.came("slow", 1, 5.0)
    assert asked(schedule, 5.0) == [("slow", 7)]


def test_schedule_of_a_donor_that_becomes_slow_holds_less() -> None:
    schedule = ChunkSchedule(range(100), ["a"])
    asked(schedule)
    schedule.came("a", 0, 0.1)
    assert len(asked(schedule, 0.1)) == 11
    schedule.came("a", 1, 22.1)
    assert asked(schedule, 22.1) == [], "ten are under way, at two seconds each"


def test_schedule_is_bounded_in_bytes_for_each_donor_and_for_all() -> None:
    schedule = ChunkSchedule(range(10_000), [f"d{index}" for index in range(16)])
    for donor, index in asked(schedule):
        schedule.came(donor, index, 0.001)
    shares = [donor for donor, _ in asked(schedule, 0.001)]
    assert len(shares) * CHUNK_BYTES == MAX_BYTES
    alone = ChunkSchedule(range(10_000), ["a"])
    asked(alone)
    alone.came("a", 0, 0.001)
    assert len(asked(alone, 0.001)) * CHUNK_BYTES == MAX_DONOR_BYTES


def test_schedule_shares_out_the_last_chunks_and_leaves_some_for_whoever_is_first() -> None:
    schedule = ChunkSchedule(range(8), ["a", "b"])
    asked(schedule)
    schedule.came("a", 0, 0.001)
    schedule.came("b", 1, 0.001)
    shares = [donor for donor, _ in asked(schedule, 0.001)]
    assert (shares.count("a"), shares.count("b")) == (2, 2)
    schedule.came("b", 3, 0.002)
    assert asked(schedule, 0.002) == [("b", 6)]


def test_schedule_at_the_end_asks_another_for_what_a_slow_donor_holds() -> None:
    schedule = ChunkSchedule(range(3), ["fast", "slow"])
    asked(schedule)
    schedule.came("fast", 0, 0.1)
    assert asked(schedule, 0.1) == [("fast", 2)]
    schedule.came("fast", 2, 0.2)
    assert asked(schedule, 0.2) == []
    assert asked(schedule, 0.25) == [("fast", 1)], "it was silent for twice what a chunk takes elsewhere"
    schedule.came("fast", 1, 0.35)
    assert not schedule.is_open
    assert schedule.num_under_way == 0


def test_schedule_does_not_ask_twice_for_what_is_about_to_come() -> None:
    schedule = ChunkSchedule(range(4), ["a", "b"])
    asked(schedule)
    schedule.came("a", 0, 1.0)
    schedule.came("b", 1, 1.0)
    asked(schedule, 1.0)
    schedule.came("a", 2, 2.0)
    assert asked(schedule, 2.05) == []


def test_schedule_with_one_chunk_for_many_silent_donors_asks_one_after_the_other() -> None:
    schedule = ChunkSchedule([5], ["a", "b", "c"])
    assert asked(schedule) == [("a", 5)]
    assert asked(schedule, 2 * ASSUMED_S) == []
    assert asked(schedule, 2 * ASSUMED_S + 0.1) == [("b", 5)]
    assert asked(schedule, 2 * ASSUMED_S + 0.2) == []
    assert asked(schedule, 4 * ASSUMED_S + 0.2) == [("c", 5)]


def test_schedule_gives_what_a_failed_donor_had_to_others_and_never_asks_it_again() -> None:
    schedule = ChunkSchedule(range(3), ["a", "b"])
    asked(schedule)
    schedule.failed("a")
    schedule.came("b", 1, 1.0)
    assert asked(schedule, 1.0) == [("b", 0), ("b", 2)]
    schedule.failed("b")
    assert schedule.is_open
    assert asked(schedule, 100.0) == []
