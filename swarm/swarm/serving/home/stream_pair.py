"""The two ends of a stream within one process: what one end sends, the other receives. Used in one event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from swarm_protocol.errors import PeerUnreachable, SwarmError

from swarm.network.interface import EndOfStream

MAX_WAITING = 4
"""Messages that wait at one end. Messages hold all frames of a moment, so more would only be older."""


class LocalStream:
    """One end of a stream. `end` closes both directions, with the error that the other end is told."""

    def __init__(self) -> None:
        self._received: deque[bytes] = deque()
        self._changed = asyncio.Condition()
        self._error: SwarmError | None = None
        self._is_over = False
        self._other: LocalStream = self

    @classmethod
    def pair(cls) -> tuple[LocalStream, LocalStream]:
        """Return the two ends of a new stream."""
        near, far = cls(), cls()
        near._other, far._other = far, near
        return near, far

    async def send(self, message: bytes) -> None:
        """Give the message to the other end, which has room for MAX_WAITING. Raises PeerUnreachable once it is over."""
        other = self._other
        async with other._changed:
            await other._changed.wait_for(lambda: other._is_over or len(other._received) < MAX_WAITING)
            if other._is_over:
                raise PeerUnreachable("the stream has ended")
            other._received.append(message)
            other._changed.notify_all()

    async def receive(self) -> bytes:
        """Return the next message. Raises EndOfStream, or the error that the other end closed the stream with."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._received or self._is_over)
            if self._received:
                self._changed.notify_all()
                return self._received.popleft()
        if self._error is not None:
            raise self._error
        raise EndOfStream

    async def finish(self) -> None:
        """Send no more: the other end receives EndOfStream after what waits there."""
        await self._other._close(None)

    async def end(self, error: SwarmError | None = None) -> None:
        """End both directions. A second call does nothing."""
        await self._other._close(error)
        await self._close(None)

    async def _close(self, error: SwarmError | None) -> None:
        async with self._changed:
            if not self._is_over:
                self._is_over, self._error = True, error
            self._changed.notify_all()
