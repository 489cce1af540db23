"""Accepts the streams that the daemon passes to this process through a unix socket, and runs a task for each.

A stream's handler closes its connection. A connection is closed here where no handler can do so: when it comes while
the network closes, and when its task is cancelled before its first step. What a stream is about belongs to the handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swarm.network.libp2p.daemon_control import BACKLOG

READ_AHEAD_BYTES = 1 << 16
"""asyncio's default. What is read ahead of a stream's messages is bounded by `unread_budget`."""

StreamTask = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class IncomingStreams:
    """Runs `serve` in `tasks` for each stream that comes, until it is closed or `tasks` are cancelled. A reader buffers
    `limit` bytes."""

    def __init__(self, tasks: asyncio.TaskGroup, serve: StreamTask, *, limit: int = READ_AHEAD_BYTES) -> None:
        self._tasks = tasks
        self._serve = serve
        self._limit = limit
        self._server: asyncio.Server | None = None
        self._closed = asyncio.Event()

    async def listen(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(self.connected, path, limit=self._limit, backlog=BACKLOG)
        self._tasks.create_task(self._close_with_tasks(), name="accept streams")

    def close(self) -> None:
        """Take no further stream. Those that have a task are left to it. A second call does nothing."""
        self._closed.set()
        if self._server is not None:
            self._server.close()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed.is_set():
            writer.transport.abort()
            return
        task = self._tasks.create_task(self._serve(reader, writer))
        # cancelled before its first step, it has not come to its own `finally`
        task.add_done_callback(lambda ended: writer.transport.abort() if ended.cancelled() else None)

    async def _close_with_tasks(self) -> None:
        """Close when `tasks` are cancelled: what came later would not be cancelled any more, and be waited for."""
        try:
            await self._closed.wait()
        finally:
            self.close()
