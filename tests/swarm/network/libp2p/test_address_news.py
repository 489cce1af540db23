"""A node sends a change of its addresses to peers in use, once and immediately."""

from __future__ import annotations

import asyncio
from typing import cast

from swarm.network.dht.own_records import LOOK_S, MAX_TOLD, tell_address_changes
from swarm.network.dht.record_dht import RecordDht
from swarm.testing import virtual_time


class FakeDht:
    def __init__(self) -> None:
        self.known = self
        self.own_addrs: tuple[str, ...] = ("/ip4/44.1.0.1/tcp/1", "/ip4/44.2.0.1/tcp/1")
        self.told: list[str] = []
        self.num_refreshes = 0

    async def ping(self, peer_id: str) -> bool:
        self.told.append(peer_id)
        return False

    async def refresh(self) -> None:
        self.num_refreshes += 1


def test_peers_in_use_get_a_change_and_nothing_else() -> None:
    async def main() -> None:
        dht, used = FakeDht(), ["a", "b"]
        running = asyncio.create_task(tell_address_changes(cast("RecordDht", dht), lambda: used))
        await asyncio.sleep(10 * LOOK_S)
        dht.own_addrs = tuple(reversed(dht.own_addrs))
        await asyncio.sleep(10 * LOOK_S)
        assert (dht.told, dht.num_refreshes) == ([], 0)
        dht.own_addrs = dht.own_addrs[:1]
        await asyncio.sleep(10 * LOOK_S)
        assert (dht.told, dht.num_refreshes) == (["a", "b"], 1)
        used.extend(map(str, range(2 * MAX_TOLD)))
        dht.own_addrs = ()
        await asyncio.sleep(10 * LOOK_S)
        assert len(dht.told) == 2 + MAX_TOLD
        running.cancel()
        await asyncio.wait((running,))

    virtual_time.run(main())
