"""Remembers the nodes nearest to the keys of this node's records, since a search for each publication would cost more
than the calls that store it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from swarm.network.dht.routing_table import RoutingTable, to_id
from swarm.newest_items import NewestItems

NUM_REPLICAS = 5
"""Nodes that store each record. A record survives until its refresh unless all of them fail."""

MIN_HOLD_S = 20.0
"""Minimum time for which the nearest nodes of a key are remembered. It is less than the time until a record is
published again, so in a changing network each publication makes a new search."""

MAX_HOLD_S = 300.0
"""Maximum time for which they are remembered. In a network whose half leaves within an hour, about one of ten nodes
near a key is new after five minutes. Readers ask ten nodes, and owners store with five."""

MAX_HELD_KEYS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holders:
    """The nodes nearest to a key, as a search found them. They are current for `hold_s` seconds, until `until`.
    `passed_over` were the nearest in the routing table at that time; some of them may not have answered."""

    peers: tuple[str, ...]
    passed_over: Sequence[str]
    hold_s: float
    until: float


class RecordHolders:
    """Remembers the nodes nearest to up to MAX_HELD_KEYS keys, by the keys' DHT ids. `table` shows when a nearer node
    is known."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table
        self._of = NewestItems[bytes, _Holders](MAX_HELD_KEYS)

    def of(self, dht_id: bytes) -> tuple[str, ...]:
        """Return the holders of the last search, without those lost since; none if there was no search."""
        holders = self._of.get(dht_id)
        return holders.peers if holders is not None else ()

    def are_current(self, dht_id: bytes) -> bool:
        """Return whether the holders are still current: it is not time to search again, and no nearer node is known."""
        holders = self._of.get(dht_id)
        if holders is None or asyncio.get_running_loop().time() >= holders.until:
            return False
        nearest = set(self._table.nearest(to_id(dht_id), NUM_REPLICAS))
        return nearest <= {*holders.peers, *holders.passed_over}

    def lose(self, dht_id: bytes, gone: Collection[str]) -> None:
        """Forget holders that did not answer, so that the next publication searches again."""
        if dht_id in self._of:
            holders = self._of[dht_id]
            peers = tuple(peer for peer in holders.peers if peer not in gone)
            self._of[dht_id] = replace(holders, peers=peers, until=0.0)

    def remember(self, dht_id: bytes, nearest: tuple[str, ...]) -> None:
        """Remember the nearest nodes, for longer the longer they have stayed the same. Fewer than NUM_REPLICAS are not
        remembered: in so small a network, each newcomer is among the nearest."""
        before = self._of.pop(dht_id, None)
        if len(nearest) < NUM_REPLICAS:
            return
        hold_s = MIN_HOLD_S
        if before is not None and (num_new := len({*nearest} - {*before.peers})) <= 1:
            hold_s = min(MAX_HOLD_S, before.hold_s * 2) if num_new == 0 else max(MIN_HOLD_S, before.hold_s / 2)
        passed_over = self._table.nearest(to_id(dht_id), NUM_REPLICAS)
        now = asyncio.get_running_loop().time()
        self._of[dht_id] = _Holders(peers=nearest, passed_over=passed_over, hold_s=hold_s, until=now + hold_s)

    def clear(self) -> None:
        self._of.clear()
