"""Tells peers of this node's network from strangers, by greeting them over the connection that they have.

Nobody is dialled for it, and a peer is asked once, however often it comes: what it answered is kept for a while, for a
bounded number of peers. A peer can claim to be of the network, of which it only has to know the name; this keeps out
hosts that look for a free relay, not enemies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from swarm_protocol.errors import PeerError

from swarm.newest_items import NewestItems

GREETING_TIMEOUT_S = 3.0
"""Time for a peer to say who it is. A peer that dials through this node waits 5 s in all."""

NETWORK_PEER_S = 600.0
STRANGER_S = 10.0
"""Time for which an answer holds; none is one, too. A node that was too busy to answer may come again soon."""

MAX_KNOWN = 1024
MAX_GREETINGS = 64
"""Peers that are greeted at the same time. Further peers are refused, and may try again."""


@dataclass(frozen=True, slots=True)
class _Finding:
    is_of_network: bool
    until: float


class KnowsNetworkPeers(Protocol):
    """Tells peers of the network from strangers: `NetworkPeers`, or the gate of a private network."""

    async def include(self, peer_id: str) -> bool: ...


class NetworkPeers:
    """Remembers which peers are of this node's network, and greets those that it does not know."""

    def __init__(self, greet: Callable[[str], Awaitable[object]]) -> None:
        """`greet(peer_id)` raises PeerError unless the peer is of this network and protocol version."""
        self._greet = greet
        self._known = NewestItems[str, _Finding](MAX_KNOWN)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def include(self, peer_id: str) -> bool:
        """Return whether the peer is of this network, as far as it says so in time."""
        if (found := self._found(peer_id)) is not None:
            return found
        if peer_id not in self._locks and len(self._locks) >= MAX_GREETINGS:
            return False
        async with self._locks.setdefault(peer_id, asyncio.Lock()):
            if (found := self._found(peer_id)) is not None:
                return found
            is_of_network = await self._says_so(peer_id)
            self._remember(peer_id, is_of_network)
            return is_of_network

    def forget(self, peer_id: str) -> None:
        """Ask a peer anew when it comes next."""
        self._known.pop(peer_id, None)

    def _found(self, peer_id: str) -> bool | None:
        finding = self._known.get(peer_id)
        if finding is None or finding.until <= asyncio.get_running_loop().time():
            return None
        return finding.is_of_network

    async def _says_so(self, peer_id: str) -> bool:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                await self._greet(peer_id)
        except (PeerError, TimeoutError):
            return False
        return True

    def _remember(self, peer_id: str, is_of_network: bool) -> None:
        hold_s = NETWORK_PEER_S if is_of_network else STRANGER_S
        self._known[peer_id] = _Finding(is_of_network, asyncio.get_running_loop().time() + hold_s)
