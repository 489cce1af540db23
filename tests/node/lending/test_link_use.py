"""The rates at which a node has sent and received lately."""

from __future__ import annotations

import asyncio

import pytest
from swarm.network.rate import OVERHEAD
from swarm.network.traffic import Traffic
from swarm.testing import virtual_time
from swarm_node.lending.traffic_count import SAMPLE_S, WINDOW_S, LinkUse, keep_sampling


def test_use_is_the_traffic_of_the_last_seconds_with_protocol_overhead() -> None:
    traffic = Traffic()
    use = LinkUse(traffic, 5.0)
    assert use.bytes_per_s(5.0) == (0.0, 0.0)
    traffic.sent_in_turn("peer", 3_000)
    traffic.received_in_turn("peer", 1_000)
    assert use.bytes_per_s(7.0) == pytest.approx((1_500 * OVERHEAD, 500 * OVERHEAD))


def test_relayed_bytes_count_in_both_directions() -> None:
    async def main() -> None:
        traffic = Traffic()
        use = LinkUse(traffic, 0.0)
        traffic.relayed(1_000)
        assert use.bytes_per_s(1.0) == pytest.approx((1_000 * OVERHEAD, 1_000 * OVERHEAD))

    asyncio.run(main())


def test_old_use_is_dropped() -> None:
    async def main() -> tuple[float, float]:
        traffic = Traffic()
        use = LinkUse(traffic, asyncio.get_running_loop().time())
        sampling = asyncio.create_task(keep_sampling(use))
        await asyncio.sleep(SAMPLE_S / 2)
        traffic.sent_in_turn("peer", 10**6)
        loop = asyncio.get_running_loop()
        assert use.bytes_per_s(loop.time())[0] > 0
        await asyncio.sleep(WINDOW_S + SAMPLE_S)
        sampling.cancel()
        return use.bytes_per_s(loop.time())

    assert virtual_time.run(main()) == (0.0, 0.0)
