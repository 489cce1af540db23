"""Bounds the dials back that peers can have from this node: each starts a libp2p daemon, a tenth of a second of work.

A peer waits for one at a time and gets few in a minute, which is enough for a node whose addresses change. As peer ids
cost nothing, all peers together are bounded, too: at most a tenth of one core. A peer that is refused asks another one.
State belongs to the network's loop, whose clock it reads.
"""

from __future__ import annotations

import asyncio
from collections import deque

MAX_WAITING = 16
"""Peers that wait at the same time. They are served one after the other."""

PERIOD_S = 60.0
MAX_PER_PEER = 5
MAX_PER_PERIOD = 60


class DialBackLimit:
    """Decides which peers are dialled back now."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._taken: deque[tuple[float, str]] = deque()  # within the last period: when, and for whom

    def takes(self, peer_id: str) -> bool:
        """Return whether a dial back begins for a peer. If so, the caller tells its end by `done`."""
        now = asyncio.get_running_loop().time()
        while self._taken and self._taken[0][0] <= now - PERIOD_S:
            self._taken.popleft()
        if peer_id in self._waiting or len(self._waiting) >= MAX_WAITING or len(self._taken) >= MAX_PER_PERIOD:
            return False
        if sum(each == peer_id for _, each in self._taken) >= MAX_PER_PEER:
            return False
        self._taken.append((now, peer_id))
        self._waiting.add(peer_id)
        return True

    def done(self, peer_id: str) -> None:
        """Note that the dial back for a peer has ended."""
        self._waiting.discard(peer_id)
