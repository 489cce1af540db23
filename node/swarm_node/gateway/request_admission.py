"""How many answers run at once, each choice of a request being one. Beyond that a client is told to come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swarm_node.gateway import http_limits
from swarm_node.gateway.api_errors import ApiError


class Gate:
    """Counts running answers. Owned by the gateway's event loop."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.num_running = 0

    @contextmanager
    def slots(self, num: int) -> Iterator[None]:
        """Hold `num` of the slots. ApiError 429 at once if fewer are free."""
        if self.num_running + num > self._capacity:
            raise ApiError(
                429,
                f"the gateway is giving {self.num_running} answers at once and may give {self._capacity}",
                code="rate_limit_exceeded",
                retry_after_s=http_limits.RETRY_AFTER_S,
            )
        self.num_running += num
        try:
            yield
        finally:
            self.num_running -= num
