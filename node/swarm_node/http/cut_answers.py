"""Tells clients whose answers a server cuts as it ends that it does so, in the form of every other error."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_node.http.event_stream import EVENT_STREAM, event
from swarm_node.http.http_error import HttpError

TELL_S = 1.0
"""The time for that: a reader that stalls holds up no shutdown."""


class CutAnswers:
    """Middleware: an answer that is cancelled becomes a 503, or ends with an error event where its stream has begun.

    Only the server cancels the task of an answer, and only as it ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: Message | None = None
        is_whole = False

        async def watch(message: Message) -> None:
            nonlocal begun, is_whole
            if message["type"] == "http.response.start":
                begun = message
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            is_plain = begun is not None and not _is_stream(begun)
            if task is None or not task.cancelling() or (is_plain and not is_whole):
                raise
            if is_whole:
                return  # the client has it all, and only what the answer held was being freed
            error = HttpError(
                503, "the answer was cut: this server is stopping", code="service_unavailable", remedy="ask again"
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(TELL_S):
                    if begun is None:
                        await error(scope, receive, send)
                    else:
                        body = event(json.dumps(error.body))
                        await send({"type": "http.response.body", "body": body, "more_body": False})


def _is_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(EVENT_STREAM.encode()) for name, value in start["headers"])
