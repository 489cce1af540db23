"""How far a peer is: round trips measured with real calls, and remembered for a while.

Every node answers pings, and whoever asks pays for them. What a peer says of its own links is left to its records.
"""

from __future__ import annotations

import asyncio

from swarm_protocol.errors import PeerViolation

from swarm.network.interface import Network

PING_METHOD = "ping"

NUM_PINGS = 3
"""The fastest counts. The first one may have to open a connection."""

LIFETIME_S = 60.0
"""Routes change seldom, and a dead peer is noticed otherwise."""

MAX_PEERS = 4096
"""Whose round trips are remembered; the longest not asked for make room."""


class RoundTrips:
    """Belongs to one node; any of its tasks may ask."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._known: dict[str, tuple[float, float]] = {}  # seconds, and when they stop counting

    async def serve(self) -> None:
        """Answer everyone's pings. Once a network."""
        await self._network.serve(PING_METHOD, _pong)

    async def measure_s(self, peer_id: str, *, timeout_s: float) -> float:
        """Seconds there and back, at most LIFETIME_S old; 0 to ourselves. Raises PeerError."""
        if peer_id == self._network.peer_id:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        rtt_s, until_s = self._known.pop(peer_id, (0.0, now_s))
        if until_s <= now_s:
            rtt_s = min([await self._ping_s(peer_id, timeout_s) for _ in range(NUM_PINGS)])
            until_s = now_s + LIFETIME_S
        self._known[peer_id] = rtt_s, until_s
        if len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]
        return rtt_s

    async def _ping_s(self, peer_id: str, timeout_s: float) -> float:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        await self._network.call(peer_id, PING_METHOD, b"", timeout_s=timeout_s)
        return loop.time() - start_s


async def _pong(peer_id: str, request: bytes) -> bytes:
    if request:
        raise PeerViolation("a ping carries nothing", peer_id=peer_id)
    return b""
