"""Bytes that wait at a server's seats to be computed: bounded for all, and for one client by three quarters of that.

So one that sends more than is computed cannot have all others refused. A single step of any size everyone may have
waiting, if there is room. Touched only from the server's event loop.
"""

from __future__ import annotations

from collections import Counter

from swarm_protocol.errors import PeerRefused


class Backlog:
    """`num_bytes` are 0 when nothing waits."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._of_client: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._of_client.total()

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
