"""Whom a server dials at the word of its clients: bounded for each client and for all, and nobody again at once.

Shared by lanes to the servers that come next and by hand-overs. Touched only from the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)

MAX_PEERS = 256
"""Peers at once. Clients name them, and each costs a stream."""

MAX_PEERS_PER_CLIENT = 32
"""A gateway's chains go on from here to a few; nobody may take all the lanes that there are for others."""

REST_S = 5.0
"""Half of what clients leave a broken link alone: before that only somebody who wants us to dial asks again."""


class Dials:
    def __init__(self) -> None:
        self._clients: dict[str, list[str]] = {}  # of each dialled peer, one for each time that it is
        self._resting: dict[str, tuple[str, float]] = {}  # for which client they were dialled, and until when

    def begin(self, peer_id: str, client: str) -> bool:
        """Whether `client` may have us dial the peer now; if so, `end` must follow."""
        now_s = asyncio.get_running_loop().time()
        self._resting = {peer: rest for peer, rest in self._resting.items() if rest[1] > now_s}
        if peer_id in self._resting:
            return False
        if peer_id not in self._clients:
            named = [clients[0] for clients in self._clients.values()]
            named += [for_client for for_client, _ in self._resting.values()]
            if len(named) >= MAX_PEERS or named.count(client) >= MAX_PEERS_PER_CLIENT:
                logger.warning("%d peers are dialled, and %d of them for %s", len(named), named.count(client), client)
                return False
        self._clients.setdefault(peer_id, []).append(client)
        return True

    def end(self, peer_id: str, client: str, *, rests: bool) -> None:
        """`rests`: it could not be reached, or has left."""
        clients = self._clients[peer_id]
        clients.remove(client)
        if not clients:
            del self._clients[peer_id]
        if rests:
            self._resting[peer_id] = client, asyncio.get_running_loop().time() + REST_S
