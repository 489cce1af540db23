"""Tests that donors' bandwidths add up when a state is downloaded, and that slow, silent, dying or lying donors cost
little."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace

import pytest
import torch
from support.donor_world import DonorWorld
from swarm.testing import virtual_time
from swarm.training.state.replica_state import CHUNK_BYTES, ReplicaState
from swarm.training.state.state_download import ASSUMED_S, MAX_BYTES, MAX_DONOR_BYTES, ChunkSchedule
from swarm_protocol.errors import PeerRefused, PeerUnreachable, RoundError

NUM_VALUES = 1 << 20
NUM_CHUNKS = 8


def seconds(uplinks: list[float], *, num_values: int = 2 * NUM_VALUES, down_mbit_s: float = 200.0) -> float:
    async def main() -> float:
        async with DonorWorld(num_values, down_mbit_s=down_mbit_s) as world:
            for up_mbit_s in uplinks:
                await world.donor(up_mbit_s)
            fetched, took_s = await world.fetch()
            assert fetched.num_bytes == 8 * num_values
            return took_s

    return virtual_time.run(main())


def test_download_adds_up_the_bandwidths_of_donors() -> None:
    alone = seconds([20.0])
    assert alone < 1.2 * 8 * 2 * NUM_VALUES / 2.5e6
    assert alone / seconds([20.0] * 4) > 0.8 * 4


def test_download_over_a_long_link_requests_several_chunks_at_once() -> None:
    """At 200 Mbit/s and a round trip of 0.3 s, one chunk at a time would take 0.34 s each."""

    async def main() -> None:
        async with DonorWorld(4 * NUM_VALUES, latency_s=0.15) as world:
            await world.donor(200.0)
            _, took_s = await world.fetch()
            assert took_s < 0.35 * 4 * NUM_CHUNKS * 0.34

    virtual_time.run(main())


def test_download_does_not_wait_for_a_slow_donor_at_its_end() -> None:
    """At 0.1 Mbit/s a chunk takes 84 s."""
    assert seconds([0.1, 20.0, 20.0]) < 1.3 * seconds([20.0, 20.0])


def test_download_over_the_members_own_slow_link_loses_no_donor(caplog: pytest.LogCaptureFixture) -> None:
    """16 chunks at once over 2 Mbit/s take 67 s, longer than the limit of one chunk."""

    async def main() -> None:
        async with DonorWorld(2 * NUM_VALUES, down_mbit_s=2.0) as world:
            for _ in range(16):
                await world.donor(20.0)
            _, took_s = await world.fetch()
            assert "dropped" not in caplog.text
            assert took_s < 1.2 * 16 * NUM_VALUES / 2.5e5

    virtual_time.run(main())


def test_download_does_not_hold_all_chunks_in_memory_at_once() -> None:
    async def main() -> None:
        async with DonorWorld(8 * NUM_VALUES) as world:
            await world.donor(1000.0)
            tracemalloc.start()
            try:
                await world.fetch()
                _, peak_bytes = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            # a chunk is in memory twice here, at its donor and at the member that fetches it; tensors are not traced
            assert peak_bytes < 2 * (16 << 20) + (8 << 20)

    virtual_time.run(main())


async def silent(_peer: str, _request: bytes) -> bytes:
    await asyncio.sleep(1e6)
    raise AssertionError("nobody waits so long")


async def refuses(peer: str, _request: bytes) -> bytes:
    raise PeerRefused("not for you", peer_id=peer)


async def breaks(peer: str, _request: bytes) -> bytes:
    raise PeerUnreachable("it died", peer_id=peer)


async def nothing(_peer: str, _request: bytes) -> bytes:
    return b""


async def too_much(_peer: str, _request: bytes) -> bytes:
    return bytes(8 << 20)


async def noise(_peer: str, _request: bytes) -> bytes:
    return b"\xaa" * (1 << 20)


async def drips(_peer: str, _request: bytes) -> bytes:
    await asyncio.sleep(29.0)
    return bytes(1 << 20)


HOSTILE = [silent, refuses, breaks, nothing, too_much, noise, drips]


@pytest.mark.parametrize("answer", HOSTILE)
def test_download_succeeds_in_time_with_one_honest_donor_among_hostile_ones(answer) -> None:
    async def main() -> None:
        async with DonorWorld(NUM_VALUES) as world:
            for _ in range(3):
                await world.donor(chunk=answer)
            await world.donor(20.0)
            fetched, took_s = await world.fetch()
            assert fetched.donors == (world.peers[3],)
            assert world.num_asked[:3] == [1, 1, 1]
            assert took_s < 15

    virtual_time.run(main())


@pytest.mark.parametrize("answer", HOSTILE)
def test_download_fails_in_time_with_hostile_donors_only(answer) -> None:
    async def main() -> None:
        async with DonorWorld(NUM_VALUES) as world:
            for _ in range(3):
                await world.donor(chunk=answer)
            started = asyncio.get_running_loop().time()
            with pytest.raises(RoundError, match=r"cannot be fetched|did not come"):
                await world.fetch()
            assert asyncio.get_running_loop().time() - started < 140

    virtual_time.run(main())


def test_download_continues_when_one_of_two_donors_falls_silent() -> None:
    async def main() -> None:
        async with DonorWorld(4 * NUM_VALUES) as world:

            async def falls_silent(peer: str, request: bytes) -> bytes:
                return await (honest.chunk if world.num_asked[0] < 6 else silent)(peer, request)

            honest = await world.donor(20.0, chunk=falls_silent)
            await world.donor(20.0)
            fetched, took_s = await world.fetch()
            assert set(fetched.donors) == set(world.peers)
            assert took_s < 20

    virtual_time.run(main())


# --- manifests -------------------------------------------------------------------------------------------------------


async def huge(_peer: str, _request: bytes) -> bytes:
    return bytes(32 << 20)


async def another(_peer: str, _request: bytes) -> bytes:
    return ReplicaState.initial(torch.zeros(NUM_VALUES)).manifest.to_bytes()


async def garbage(_peer: str, _request: bytes) -> bytes:
    return b"\xff" * 1000


@pytest.mark.parametrize("answer", [silent, refuses, breaks, nothing, huge, another, garbage])
def test_manifest_is_fetched_in_time_from_one_honest_donor_behind_hostile_ones(answer) -> None:
    async def main() -> None:
        async with DonorWorld(NUM_VALUES) as world:
            for _ in range(3):
                await world.donor(manifest=answer)
            await world.donor(20.0)
            _, took_s = await world.fetch()
            assert took_s < 15

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("answer", "reason"), [(huge, "more than"), (another, "digest"), (garbage, "digest"), (silent, "no answer")]
)
def test_manifest_of_hostile_donors_only_raises_a_clear_error(answer, reason: str) -> None:
    async def main() -> None:
        async with DonorWorld(NUM_VALUES) as world:
            for _ in range(3):
                await world.donor(manifest=answer)
            with pytest.raises(RoundError, match=reason):
                await world.fetch()
            assert world.num_asked == [0, 0, 0]

    virtual_time.run(main())


# --- chunks that the member already has -------------------------------------------------------------------------------


def test_download_reuses_equal_chunks_of_each_own_state() -> None:
    async def main() -> None:
        async with DonorWorld(NUM_VALUES) as world:
            await world.donor()
            half_theta_N, half_momentum_N = world.own.theta_N.clone(), world.own.momentum_N.clone()
            half_theta_N[:] = world.wanted.theta_N
            half_momentum_N[: NUM_VALUES // 2] = world.wanted.momentum_N[: NUM_VALUES // 2]
            first = replace(world.own, theta_N=half_theta_N).hashed_again()
            second = replace(world.own, momentum_N=half_momentum_N).hashed_again()
            fetched, _ = await world.fetch([first, second])
            assert fetched.num_bytes == 2 << 20

    virtual_time.run(main())


def asked(schedule: ChunkSchedule, now: float = 0.0) -> list[tuple[str, int]]:
    """Return all requests that are due now."""
    return list(iter(lambda: schedule.next(now), None))  # type: ignore[arg-type]


def test_schedule_asks_each_donor_for_one_chunk_at_first() -> None:
    assert asked(ChunkSchedule(range(10), ["a", "b", "c"])) == [("a", 0), ("b", 1), ("c", 2)]


def test_schedule_fills_a_fast_donors_link_and_leaves_a_slow_one_its_chunk() -> None:
    schedule = ChunkSchedule(range(100), ["fast", "slow"])
    asked(schedule)
    schedule.delivered("fast", 0, 0.25)
    assert asked(schedule, 0.25) == [("fast", index) for index in range(2, 7)], (
        "the donor sends four chunks a second, and one more is requested ahead"
    )
    schedule.delivered("slow", 1, 5.0)
    assert asked(schedule, 5.0) == [("slow", 7)]


def test_schedule_gives_a_donor_that_becomes_slow_fewer_chunks() -> None:
    schedule = ChunkSchedule(range(100), ["a"])
    asked(schedule)
    schedule.delivered("a", 0, 0.1)
    assert len(asked(schedule, 0.1)) == 11
    schedule.delivered("a", 1, 22.1)
    assert asked(schedule, 22.1) == [], "ten chunks of two seconds each are under way"


def test_schedule_is_bounded_in_bytes_for_each_donor_and_for_all() -> None:
    schedule = ChunkSchedule(range(10_000), [f"d{index}" for index in range(16)])
    for donor, index in asked(schedule):
        schedule.delivered(donor, index, 0.001)
    shares = [donor for donor, _ in asked(schedule, 0.001)]
    assert len(shares) * CHUNK_BYTES == MAX_BYTES
    alone = ChunkSchedule(range(10_000), ["a"])
    asked(alone)
    alone.delivered("a", 0, 0.001)
    assert len(asked(alone, 0.001)) * CHUNK_BYTES == MAX_DONOR_BYTES


def test_schedule_shares_out_the_last_chunks_and_keeps_some_for_the_first_free_donor() -> None:
    schedule = ChunkSchedule(range(8), ["a", "b"])
    asked(schedule)
    schedule.delivered("a", 0, 0.001)
    schedule.delivered("b", 1, 0.001)
    shares = [donor for donor, _ in asked(schedule, 0.001)]
    assert (shares.count("a"), shares.count("b")) == (2, 2)
    schedule.delivered("b", 3, 0.002)
    assert asked(schedule, 0.002) == [("b", 6)]


def test_schedule_asks_another_donor_for_the_last_chunks_of_a_slow_one() -> None:
    schedule = ChunkSchedule(range(3), ["fast", "slow"])
    asked(schedule)
    schedule.delivered("fast", 0, 0.1)
    assert asked(schedule, 0.1) == [("fast", 2)]
    schedule.delivered("fast", 2, 0.2)
    assert asked(schedule, 0.2) == []
    assert asked(schedule, 0.25) == [("fast", 1)], (
        "the slow donor was silent for twice the time of a chunk from another donor"
    )
    schedule.delivered("fast", 1, 0.35)
    assert not schedule.is_open
    assert schedule.num_under_way == 0


def test_schedule_does_not_ask_again_for_a_chunk_that_is_about_to_arrive() -> None:
    schedule = ChunkSchedule(range(4), ["a", "b"])
    asked(schedule)
    schedule.delivered("a", 0, 1.0)
    schedule.delivered("b", 1, 1.0)
    asked(schedule, 1.0)
    schedule.delivered("a", 2, 2.0)
    assert asked(schedule, 2.05) == []


def test_schedule_asks_silent_donors_one_after_the_other_for_a_single_chunk() -> None:
    schedule = ChunkSchedule([5], ["a", "b", "c"])
    assert asked(schedule) == [("a", 5)]
    assert asked(schedule, 2 * ASSUMED_S) == []
    assert asked(schedule, 2 * ASSUMED_S + 0.1) == [("b", 5)]
    assert asked(schedule, 2 * ASSUMED_S + 0.2) == []
    assert asked(schedule, 4 * ASSUMED_S + 0.2) == [("c", 5)]


def test_schedule_gives_a_failed_donors_chunks_to_others_and_never_asks_it_again() -> None:
    schedule = ChunkSchedule(range(3), ["a", "b"])
    asked(schedule)
    schedule.failed("a")
    schedule.delivered("b", 1, 1.0)
    assert asked(schedule, 1.0) == [("b", 0), ("b", 2)]
    schedule.failed("b")
    assert schedule.is_open
    assert asked(schedule, 100.0) == []


def test_parts_are_requested_from_slow_holders_last() -> None:
    async def main() -> None:
        async with DonorWorld(1000) as world:
            peers = ["a", "b", "slow", "c"]
            world.mine.links.rates_from = lambda _peers: {"a": 4e6, "b": 2e6, "slow": 1e5}  # type: ignore[method-assign]
            assert [world.fetcher._in_turn(peers, index) for index in range(3)] == [
                ["a", "b", "c", "slow"],
                ["b", "c", "a", "slow"],
                ["c", "a", "b", "slow"],
            ]

    virtual_time.run(main())
