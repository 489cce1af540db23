"""A rate limit counts each peer, and forgets peers whose requests are a period old. A pace delays each peer."""

from __future__ import annotations

import asyncio

import pytest
from swarm.network.peer_budgets import PeerPace, PeerRateLimit
from swarm.testing import virtual_time


def test_requests_are_bounded_in_any_period_for_each_peer_and_for_all() -> None:
    async def main() -> None:
        limit = PeerRateLimit[str](period_s=10.0, per_peer=2, in_all=3)
        assert limit.takes("one")
        await asyncio.sleep(9.0)
        assert [limit.takes(peer) for peer in ("one", "one", "two", "three")] == [True, False, True, False]
        await asyncio.sleep(1.0)  # the first request is a period old
        assert [limit.takes(peer) for peer in ("one", "two")] == [True, False]

    virtual_time.run(main())


def test_requests_of_one_network_are_bounded_however_many_peers_it_has() -> None:
    async def main() -> None:
        limit = PeerRateLimit[str](period_s=10.0, per_peer=2, per_network=3, in_all=5)
        asked = [limit.takes(peer, "a") for peer in ("one", "one", "one", "two", "three")]
        assert asked == [True, True, False, True, False]
        assert [limit.takes(peer, "b") for peer in ("four", "five", "six")] == [True, True, False]
        await asyncio.sleep(10.0)
        assert limit.takes("three", "a")
        assert len(limit._taken) == len(limit._num_taken) == len(limit._num_of_network) == 1

    virtual_time.run(main())


def test_peers_are_forgotten_after_a_period() -> None:
    async def main() -> None:
        limit = PeerRateLimit[int](period_s=10.0, per_peer=1)
        for number in range(100):
            assert limit.takes(number)
            await asyncio.sleep(1.0)
        assert len(limit._taken) == len(limit._num_taken) == 10

    virtual_time.run(main())


def test_requests_beyond_the_burst_wait_their_turn_and_other_peers_do_not() -> None:
    async def main() -> None:
        pace = PeerPace[str](per_s=2.0, burst_s=10.0)
        now = asyncio.get_running_loop().time
        for wait_s in (0.0, 30.0):  # from the start, and after a pause
            await asyncio.sleep(wait_s)
            begin_s = now()
            for _ in range(20):
                await pace.wait("one")
            assert now() == begin_s
            await asyncio.gather(*(pace.wait("one") for _ in range(6)))
            assert now() - begin_s == pytest.approx(3.0)
            await pace.wait("two")
            assert now() - begin_s == pytest.approx(3.0)

    virtual_time.run(main())


def test_no_request_waits_longer_than_the_burst() -> None:
    async def main() -> None:
        pace = PeerPace[str](per_s=2.0, burst_s=10.0)
        pace.count("one", 1000)
        begin_s = asyncio.get_running_loop().time()
        await pace.wait("one")
        assert asyncio.get_running_loop().time() - begin_s == pytest.approx(10.0)

    virtual_time.run(main())
