"""How HTTP connections are bounded: in number, in the time until a request is there, and in what waits for a reader.

Thousands that say nothing cost a few seconds of a socket each. Whoever opens one connection too many closes the
one that has been silent for longest, first of those that never asked for anything; so both a new client and one that
comes back are answered, however many silent ones there are.
"""

from __future__ import annotations

import asyncio
import resource
from itertools import chain
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm_node.gateway import http_limits


def max_connections() -> int:
    """Half of the files that this process may open, at most; the rest is for the swarm."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(http_limits.MAX_CONNECTIONS, allowed // 2))


def bounded_protocol(max_open: int) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1 for one server of at most `max_open` connections."""

    class OfOneServer(BoundedHttp):
        capacity = max_open
        unheard: ClassVar[dict[BoundedHttp, None]] = {}
        idle: ClassVar[dict[BoundedHttp, None]] = {}

    return OfOneServer


class BoundedHttp(H11Protocol):
    """One connection. Those without a request are `unheard` before their first and `idle` after it, oldest first."""

    capacity: ClassVar[int]
    unheard: ClassVar[dict[BoundedHttp, None]]
    idle: ClassVar[dict[BoundedHttp, None]]
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._fall_silent()
        if len(self.connections) > self.capacity:
            oldest = next((other for other in chain(self.unheard, self.idle) if other is not self), self)
            oldest._speak()
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._speak()
        _cancel(self._reader_timer)
        _cancel(self.timeout_keep_alive_task)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_busy():
            self._speak()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy():
            self._fall_silent()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(http_limits.HTTP_WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._reader_timer)
        super().resume_writing()

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _fall_silent(self) -> None:
        """Ends also a connection that is closing and whose reader does not take the last of an answer."""
        self._speak()
        (self.unheard if self.cycle is None else self.idle)[self] = None
        self._head_timer = self.loop.call_later(http_limits.HTTP_HEAD_TIMEOUT_S, self.transport.abort)

    def _speak(self) -> None:
        self.unheard.pop(self, None)
        self.idle.pop(self, None)
        _cancel(self._head_timer)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
