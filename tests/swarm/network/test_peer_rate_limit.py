"""A rate limit counts each peer, and forgets peers whose requests are a period old."""

from __future__ import annotations

import asyncio

from swarm.network.peer_rate_limit import PeerRateLimit
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


def test_peers_are_forgotten_after_a_period() -> None:
    async def main() -> None:
        limit = PeerRateLimit[int](period_s=10.0, per_peer=1)
        for number in range(100):
            assert limit.takes(number)
            await asyncio.sleep(1.0)
        assert len(limit._taken) == len(limit._num_taken) == 10

    virtual_time.run(main())
