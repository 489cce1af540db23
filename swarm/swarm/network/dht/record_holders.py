"""The nodes that took a key's last record, and for how long they are taken to be the nearest ones.

`RecordDht` publishes a record every half minute. A search each time would cost more than the calls that store it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from swarm.network.dht.routing_table import RoutingTable, to_id
from swarm.newest_items import NewestItems

NUM_REPLICAS = 5
"""Records outlive this many less one simultaneous deaths, until their owner refreshes them."""

MIN_HOLD_S = 20.0
"""Less than the time until a record is published again: in a network that changes, each time is a new search."""

MAX_HOLD_S = 300.0
"""In five minutes of a network whose half leaves in an hour, one of ten nodes near a key is a new one. Readers ask ten
nodes, and owners store with five."""

MAX_HELD_KEYS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holders:
    """The nodes nearest to a key, as a search found them; good for `hold_s`, which ends at `until`. `passed_over` were
    nearest of those that this node knew then, some of which may not have answered."""

    peers: tuple[str, ...]
    passed_over: Sequence[str]
    hold_s: float
    until: float


class RecordHolders:
    """Remembers the holders of MAX_HELD_KEYS keys, by the keys' DHT ids. `table` knows nodes that are nearer."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table
        self._of = NewestItems[bytes, _Holders](MAX_HELD_KEYS)

    def of(self, dht_id: bytes) -> tuple[str, ...]:
        """Return the holders by the last search, without those that are lost since; none if there was no search."""
        holders = self._of.get(dht_id)
        return holders.peers if holders is not None else ()

    def are_current(self, dht_id: bytes) -> bool:
        """Return whether it is not yet time to search again, and no nearer node is known."""
        holders = self._of.get(dht_id)
        if holders is None or asyncio.get_running_loop().time() >= holders.until:
            return False
        nearest = set(self._table.nearest(to_id(dht_id), NUM_REPLICAS))
        return nearest <= {*holders.peers, *holders.passed_over}

    def lose(self, dht_id: bytes, gone: Collection[str]) -> None:
        """Forget holders that did not answer, and let the next time be a new search."""
        if dht_id in self._of:
            holders = self._of[dht_id]
            peers = tuple(peer for peer in holders.peers if peer not in gone)
            self._of[dht_id] = replace(holders, peers=peers, until=0.0)

    def remember(self, dht_id: bytes, nearest: tuple[str, ...]) -> None:
        """Go by `nearest` the longer, the longer they have stayed the same. Fewer than all replicas are a network that
        has just begun, where the next node to come is one of them."""
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
