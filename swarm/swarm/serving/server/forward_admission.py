"""Memory and turns for calls on whole sequences: what one client, and all together, may have at a time.

Owned by `forward`, in its loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarm_protocol.errors import ConfigError, PeerRefused

RETRY_AFTER_S = 1.0
"""Most calls take less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBounds:
    """`max_bytes` of tensors for all calls, half of it for one client's. Raises ConfigError."""

    max_bytes: int = 2**30
    max_calls: int = 32
    max_client_calls: int = 4

    def __post_init__(self) -> None:
        if min(self.max_bytes, self.max_calls, self.max_client_calls) < 1:
            raise ConfigError("bounds of calls on whole sequences must be above 0", remedy="use 1 or more")


class ForwardRoom:
    """What is in use. `num_bytes` and `num_calls` are 0 when nobody calls."""

    def __init__(self, bounds: ForwardBounds) -> None:
        self._bounds = bounds
        self._calls: list[tuple[str, int]] = []

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._calls)

    @contextmanager
    def reserved(self, client: str, num_bytes: int) -> Iterator[None]:
        """Raises PeerRefused, with `retry_after_s` if there may be room later."""
        most = self._bounds.max_bytes // 2
        if num_bytes > most:
            raise PeerRefused(
                f"the call takes {num_bytes} bytes, and a client may have {most} here",
                remedy="use fewer or shorter sequences, or no logits",
            )
        own = [taken for peer_id, taken in self._calls if peer_id == client]
        if len(own) >= self._bounds.max_client_calls or sum(own) + num_bytes > most:
            raise self._busy("other calls of yours are under way")
        if self.num_calls >= self._bounds.max_calls or self.num_bytes + num_bytes > self._bounds.max_bytes:
            raise self._busy("others call, too")
        call = (client, num_bytes)
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def _busy(self, why: str) -> PeerRefused:
        return PeerRefused(
            f"no room for another call on whole sequences: {why}",
            remedy="wait, or ask another server",
            retry_after_s=RETRY_AFTER_S,
        )
