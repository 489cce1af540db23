"""Tells peers when this node's own addresses have changed, so that they find it when the path to it is lost.

Peers learn addresses from requests and answers of the DHT, of which two peers may exchange none for minutes. So those
that are in use are told at once, and so are the nodes near this node's place, whom others ask. `run` is a task of the
network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from itertools import islice

from swarm.network.dht.record_dht import RecordDht

LOOK_S = 1.0
"""Time between two looks, and so the least between two changes that are told."""

MAX_TOLD = 256


class AddressNews:
    def __init__(self, dht: RecordDht, used: Callable[[], Collection[str]]) -> None:
        """`used` returns the peers that would look for this node if its connection to them was lost."""
        self._dht = dht
        self._used = used

    async def run(self) -> None:
        told = set(self._dht.own_addrs)
        while True:
            await asyncio.sleep(LOOK_S)
            if (now := set(self._dht.own_addrs)) != told:
                told = now
                await asyncio.gather(*map(self._dht.ping, islice(self._used(), MAX_TOLD)), self._dht.refresh())
