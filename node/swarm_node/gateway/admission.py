"""How many requests run at once. Beyond that a client is told to come back, instead of all of them becoming slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swarm_node.gateway import bounds
from swarm_node.gateway.errors import ApiError


class Gate:
    """Counts running requests. Owned by the gateway's event loop."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.num_running = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the slots. ApiError 429 at once if all are taken."""
        if self.num_running >= self._capacity:
            raise ApiError(
                429,
                f"the gateway is answering {self._capacity} requests, as many as it may",
                code="rate_limit_exceeded",
                retry_after_s=bounds.RETRY_AFTER_S,
            )
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
