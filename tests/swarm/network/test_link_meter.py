"""Rates and round trips as observed traffic shows them, on a simulated internet whose links are known."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable

import pytest
from swarm.network.interface import EndOfStream, Stream
from swarm.network.link_meter import KEPT_S, MAX_BYTES_PER_S, MAX_PEERS, SAMPLE_BYTES, LinkMeter
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.network.round_trips import NUM_PINGS, PING_METHOD, RoundTrips
from swarm.testing import virtual_time


def _run(case: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await case()

    virtual_time.run(main())


async def _give(sender: MemoryNetwork, method: str, sizes: list[int], pause_s: float = 0.0) -> None:
    async def give(_peer_id: str, stream: Stream) -> None:
        for size in sizes:
            await stream.send(bytes(size))
            await asyncio.sleep(pause_s)

    await sender.serve_stream(method, give)


async def _take(receiver: MemoryNetwork, sender: MemoryNetwork, method: str) -> None:
    async with receiver.stream(sender.peer_id, method, timeout_s=60) as stream:
        with contextlib.suppress(EndOfStream):
            while True:
                await stream.receive()


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_rate_is_that_of_the_link_however_much_is_sent(pause_s: float) -> None:
    async def case() -> None:
        internet = MemoryInternet(1, LinkModel(latency_s=0.04, bandwidth_bytes_per_s=2e6))
        sender, receiver = internet.network(), internet.network()
        await _give(sender, "give", [300_000] * 6, pause_s)
        assert receiver.links.rate_from(sender.peer_id) is None
        await _take(receiver, sender, "give")
        rate = receiver.links.rate_from(sender.peer_id)
        assert rate == pytest.approx(2e6, rel=0.05)
        assert sender.links.rate_from(receiver.peer_id) is None
        await internet.close()

    _run(case)


def test_parallel_streams_show_the_rate_of_their_link_together() -> None:
    async def case() -> None:
        internet = MemoryInternet(1, LinkModel(latency_s=0.02, bandwidth_bytes_per_s=2e6))
        sender, receiver = internet.network(), internet.network()
        for index in range(4):
            await _give(sender, f"give{index}", [200_000] * 8)
        async with asyncio.TaskGroup() as tasks:
            for index in range(4):
                tasks.create_task(_take(receiver, sender, f"give{index}"))
        assert receiver.links.rate_from(sender.peer_id) == pytest.approx(2e6, rel=0.1)
        await internet.close()

    _run(case)


def test_senders_are_ordered_by_observed_rate_and_unknown_ones_count_as_average() -> None:
    async def case() -> None:
        internet = MemoryInternet(1)
        receiver = internet.network(down_bytes_per_s=20e6)
        rates = {internet.network(up_bytes_per_s=rate): rate for rate in (1e6, 8e6, 3e6)}
        for sender in rates:
            await _give(sender, "give", [400_000] * 4)
            await _take(receiver, sender, "give")
        await asyncio.sleep(1)
        slow, fast, middle = (sender.peer_id for sender in rates)
        assert list(receiver.links.rates_from([slow, middle, "stranger", fast])) == [fast, middle, slow]
        assert receiver.links.fastest_first([slow, "stranger", fast]) == [fast, "stranger", slow]
        await asyncio.sleep(KEPT_S + 1)
        assert receiver.links.rates_from([slow, fast]) == {}
        await internet.close()

    _run(case)


def test_short_messages_show_no_rate_and_impossible_rates_are_bounded() -> None:
    async def case() -> None:
        meter, now = LinkMeter(), asyncio.get_running_loop().time
        for _ in range(1000):
            meter.received("chatty", 10_000, now())
        assert meter.rate_from("chatty") is None
        meter.received("instant", 2**40, now())
        assert meter.rate_from("instant") is None
        await asyncio.sleep(0.02)
        meter.received("instant", 2**60, now() - 0.02)
        await asyncio.sleep(1)
        assert meter.rate_from("instant") == MAX_BYTES_PER_S
        assert math.isfinite(MAX_BYTES_PER_S)

    _run(case)


def test_memory_of_strangers_rates_is_bounded() -> None:
    async def case() -> None:
        meter = LinkMeter()
        for index in range(2 * MAX_PEERS):
            meter.received(f"peer{index}", SAMPLE_BYTES, 0.0)
            meter.answered(f"peer{index}", 0.1)
        assert len(meter._links) == MAX_PEERS
        await asyncio.sleep(1)
        assert meter.rate_from("peer0") is None
        assert meter.rate_from(f"peer{2 * MAX_PEERS - 1}") is not None

    _run(case)


def test_peer_is_not_pinged_when_its_answers_have_shown_its_round_trip() -> None:
    async def case() -> None:
        internet = MemoryInternet(1, LinkModel(latency_s=0.03))
        asking, other = internet.network(), internet.network()
        num_pings = 0

        async def pong(_peer_id: str, _request: bytes) -> bytes:
            nonlocal num_pings
            num_pings += 1
            return b""

        await other.serve(PING_METHOD, pong)
        trips = RoundTrips(asking)
        for seconds in (0.5, 0.06, 0.07):
            asking.links.answered(other.peer_id, seconds)
        assert await trips.measure_s(other.peer_id, timeout_s=5) == 0.06
        assert num_pings == 0
        await asyncio.sleep(120)  # the observation is too old now
        assert await trips.measure_s(other.peer_id, timeout_s=5) == pytest.approx(0.06)
        assert num_pings == NUM_PINGS
        await internet.close()

    _run(case)
