"""Bounds how often something is done for one peer, and for all peers together: by refusal (`PeerRateLimit`) or by delay
(`PeerPace`).

State belongs to the network's loop, whose clock it reads.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from swarm.held_counts import HeldCounts
from swarm.network.rate import Rate
from swarm.newest_items import NewestItems

MAX_PACED = 4096
"""Maximum peers that `PeerPace` remembers. A peer that is forgotten has its whole burst again."""

K = TypeVar("K", bound=Hashable)


class PeerRateLimit(Generic[K]):
    """Allows `per_peer` requests of one peer, and `in_all` of all peers, within any `period_s`."""

    def __init__(self, *, period_s: float, per_peer: int, in_all: float = math.inf) -> None:
        self._period_s = period_s
        self._per_peer = per_peer
        self._in_all = in_all
        self._taken: deque[tuple[float, K]] = deque()  # time and peer of each request within the last period
        self._num_taken = HeldCounts[K]()

    def takes(self, peer: K) -> bool:
        """Return whether a request of a peer is allowed now. If so, it counts."""
        now = asyncio.get_running_loop().time()
        while self._taken and self._taken[0][0] <= now - self._period_s:
            _, earlier = self._taken.popleft()
            self._num_taken[earlier] -= 1
        if self._num_taken[peer] >= self._per_peer or len(self._taken) >= self._in_all:
            return False
        self._taken.append((now, peer))
        self._num_taken[peer] += 1
        return True


class PeerPace(Generic[K]):
    """Delays the requests of each peer beyond `per_s` a second. Those unused within `burst_s` are made up for.

    No request waits longer than `burst_s`. For the rate to hold, a peer may have only `per_s * burst_s` under way.
    """

    def __init__(self, *, per_s: float, burst_s: float) -> None:
        self._per_s = per_s
        self._burst_s = burst_s
        self._rates = NewestItems[K, Rate](MAX_PACED)

    async def wait(self, peer: K) -> None:
        """Count a request of a peer, and wait until its turn."""
        if (wait_s := self.count(peer, 1)) > 0:
            await asyncio.sleep(wait_s)

    def count(self, peer: K, num_requests: float) -> float:
        """Count `num_requests` of a peer, and return the seconds until their turn; not above 0 if it has come."""
        if (rate := self._rates.get(peer)) is None:
            rate = Rate(self._per_s, burst_s=self._burst_s, max_debt_s=self._burst_s)
        self._rates[peer] = rate
        now_s = asyncio.get_running_loop().time()
        return rate.reserve(num_requests, now_s) - now_s
