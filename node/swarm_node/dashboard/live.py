"""Live events for visitors. Each event is encoded once for all streams, and nothing is queued.

A stream sends the newest overview when it can. An overview that was replaced meanwhile is never sent, so a slow reader
needs no queue. An event has only the overview, so that many streams cost little; other routes and pages have the
details. Streams are limited in number and duration, and browsers reconnect by themselves. The task of a request owns
its stream, and the event loop owns `Live`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from swarm.held_counts import HeldCounts

from swarm_node.dashboard.views import Overview, ViewSource
from swarm_node.http.addresses import caller_of
from swarm_node.http.event_stream import EventStream, event, wait_disconnected
from swarm_node.http.http_error import HttpError

MAX_STREAMS = 512
"""Maximum number of streams. Each holds a connection and a task, some 50 KiB."""

MAX_STREAMS_EACH = 64
"""Maximum number of streams of one address. It is enough for a school behind one NAT."""

HEARTBEAT_S = 10.0

MAX_STREAM_S = 900.0
"""The age in seconds at which a stream ends. A reader that is still there opens the next."""

RETRY_AFTER_S = 10.0


class Live:
    """Holds what all live streams share."""

    def __init__(self, source: ViewSource) -> None:
        self.source = source
        self._streams = HeldCounts[str]()
        self._encoded: tuple[Overview, bytes] | None = None
        self.closed = asyncio.Event()

    @property
    def num_streams(self) -> int:
        return self._streams.total()

    def close(self) -> None:
        """End all streams, so that a stopping server does not wait for them."""
        self.closed.set()

    @contextmanager
    def slot(self, address: str) -> Iterator[None]:
        """Hold the slot of one stream while the context lasts. Raises HttpError if no slot is free."""
        if self.num_streams >= MAX_STREAMS or self.closed.is_set():
            raise HttpError(
                503,
                f"all {MAX_STREAMS} live streams of this dashboard are taken",
                remedy="use the pages or /api/v1/overview, which have the same data without live updates",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._streams[address] >= MAX_STREAMS_EACH:
            raise HttpError(
                429,
                f"this address has {MAX_STREAMS_EACH} live streams open already",
                remedy="close some of them",
                retry_after_s=RETRY_AFTER_S,
            )
        with self._streams.holding(address):
            yield

    def overview(self) -> tuple[Overview, bytes]:
        """Return the newest overview and its event, which is encoded once for all streams."""
        overview = self.source.overview()
        if self._encoded is None or overview is not self._encoded[0]:
            self._encoded = overview, event(overview.model_dump_json(), "overview")
        return self._encoded


class LiveResponse(Response):
    media_type = "text/event-stream"

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._live.slot(caller_of(scope)):
                await self._stream(receive, EventStream(send, {"cache-control": "no-store"}))
        except HttpError as error:
            await error(scope, receive, send)

    async def _stream(self, receive: Receive, events: EventStream) -> None:
        """Send news until the visitor leaves, the dashboard closes or the stream reaches its maximum age."""
        gone = asyncio.create_task(wait_disconnected(receive), name="visitor left")
        sending = asyncio.create_task(self._send_news(events), name="news for a visitor")
        over = {gone, sending, asyncio.create_task(self._live.closed.wait(), name="dashboard closes")}
        try:
            await asyncio.wait(over, timeout=MAX_STREAM_S, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            for task in over:
                task.cancel()
        if not gone.done():
            await events.end()

    async def _send_news(self, events: EventStream) -> NoReturn:
        source = self._live.source
        while True:
            overview, data = self._live.overview()
            await events.send(data)
            while source.overview() is overview:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await source.wait_changed()
                except TimeoutError:
                    await events.send(event(f'{{"at": {time.time():.3f}}}', "heartbeat"))
