"""Bounds how often something is done for one peer, and for all peers together.

State belongs to the network's loop, whose clock it reads.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class PeerRateLimit(Generic[K]):
    """Allows `per_peer` requests of one peer, and `in_all` of all peers, within any `period_s`."""

    def __init__(self, *, period_s: float, per_peer: int, in_all: float = math.inf) -> None:
        self._period_s = period_s
        self._per_peer = per_peer
        self._in_all = in_all
        self._taken: deque[tuple[float, K]] = deque()  # time and peer of each request within the last period
        self._num_taken: Counter[K] = Counter()

    def takes(self, peer: K) -> bool:
        """Return whether a request of a peer is allowed now. If so, it counts."""
        now = asyncio.get_running_loop().time()
        while self._taken and self._taken[0][0] <= now - self._period_s:
            _, earlier = self._taken.popleft()
            self._num_taken[earlier] -= 1
            if not self._num_taken[earlier]:
                del self._num_taken[earlier]
        if self._num_taken[peer] >= self._per_peer or len(self._taken) >= self._in_all:
            return False
        self._taken.append((now, peer))
        self._num_taken[peer] += 1
        return True
