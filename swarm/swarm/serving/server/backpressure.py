"""Bytes that wait at a server's sessions to be computed: bounded for all, and for one client by three quarters of that.

So one that sends more than is computed cannot have all others refused. A single step of any size everyone may have
waiting, if there is room. Whoever reads what clients send waits for `room` first, so that one which sends faster than
is computed has to wait, and what is refused is what came together or by others. Touched only from the server's event
loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from swarm_protocol.errors import PeerRefused


class Backpressure:
    """`num_bytes` are 0 when nothing waits."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._of_client: Counter[str] = Counter()
        self._news = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        return self._of_client.total()

    async def room(self, client: str) -> None:
        """Wait while half of the client's share is taken, or half of all and some of it by this client."""
        while self._is_filling(client):
            self._news.clear()
            await self._news.wait()

    def _is_filling(self, client: str) -> bool:
        own = self._of_client[client]
        return 8 * own > 3 * self._max_bytes or (own > 0 and 2 * self.num_bytes > self._max_bytes)

    def take(self, client: str, num_bytes: int) -> None:
        """Raises PeerRefused."""
        own = self._of_client[client] + num_bytes
        is_over = own > num_bytes and 4 * own > 3 * self._max_bytes
        if is_over or self.num_bytes + num_bytes > self._max_bytes:
            raise PeerRefused("too much waits at the server", remedy="send less at once", retry_after_s=1.0)
        self._of_client[client] = own

    def give_back(self, client: str, num_bytes: int) -> None:
        self._of_client[client] -= num_bytes
        if not self._of_client[client]:
            del self._of_client[client]
        self._news.set()
