"""Tests of what a volunteer announces about its links, from the traffic on them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.serving.server.capability import VolunteerOptions, hidden_ms
from swarm.serving.server.span_placer import SpanPlacer
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError


def test_announced_links_are_the_slowest_ones_when_there_are_too_many(tmp_path: Path) -> None:
    async def main() -> None:
        network = MemoryInternet().network()
        placer = SpanPlacer(network, Membership(network), tmp_path, name="tiny", options=VolunteerOptions())
        placer._hidden_size = 1000
        rates = {f"peer{index}": 1e5 * (index + 1) for index in range(2 * limits.MAX_RTT_PEERS)} | {"near": 1e9}
        for peer_id, rate in rates.items():
            network.links.received(peer_id, int(4 * rate), asyncio.get_running_loop().time() - 4.0)
        await asyncio.sleep(1)
        assert placer._token_ms(["near", "peer0", "peer9", "stranger"]) == pytest.approx({"peer9": 4.0, "peer0": 40.0})
        announced = placer._token_ms(list(rates))
        assert set(announced) == {f"peer{index}" for index in range(limits.MAX_RTT_PEERS)}
        await network.close()

    virtual_time.run(main())


def test_token_time_stays_within_the_limits_of_a_record() -> None:
    assert hidden_ms(4096, 16_384) == 1000.0
    assert hidden_ms(16_384, 1e-3) == limits.MAX_RTT_MS


def test_volunteer_refuses_to_serve_when_its_upload_is_nearly_zero(tmp_path: Path) -> None:
    async def main() -> None:
        network = MemoryInternet().network()
        options = VolunteerOptions(up_bytes_per_s=12_500)
        placer = SpanPlacer(network, Membership(network), tmp_path, name="large", options=options)
        with pytest.raises(ConfigError, match=r"0\.13 tokens/s of large: its upload is limited to 0\.1 Mbit/s"):
            placer._check_upload(0.127)
        placer._check_upload(0.6)
        unlimited = SpanPlacer(network, Membership(network), tmp_path, name="large", options=VolunteerOptions())
        unlimited._check_upload(0.1)
        await network.close()

    virtual_time.run(main())
