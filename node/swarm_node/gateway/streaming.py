"""Answers one request from a running generation: at once, or token by token as server-sent events.

The whole life of a generation is inside `Answer.__call__`, so a client's disconnect, a stalled reader, a deadline or a
shutdown all end in the same place, where the generation is closed and its chain freed. The status is decided when the
first token is there: failures before it are plain errors, later ones an error event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from swarm_node.gateway import bounds
from swarm_node.gateway.backend import Generation
from swarm_node.gateway.errors import from_exception
from swarm_node.gateway.shapes import Json, Shape, Usage

TRACE_HEADER = "x-swarm-trace"


class Answer(Response):
    """The response to one completion request. `begin` gives the generation; leaving its context frees it."""

    def __init__(
        self,
        shape: Shape,
        begin: Callable[[], AbstractAsyncContextManager[Generation]],
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        super().__init__()
        self._shape = shape
        self._begin = begin
        self._stream = stream
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first."""
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(self._answer(scope, receive, send))
            watching = group.create_task(_cancel_on_disconnect(receive, answering))
            answering.add_done_callback(lambda _done: watching.cancel())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = _EventStream(send, {TRACE_HEADER: self._shape.id})
        try:
            async with asyncio.timeout(bounds.GENERATION_TIMEOUT_S), self._begin() as generation:
                if self._stream:
                    await self._send_chunks(generation, events)
                    return
                whole = await self._collect(generation)
        except Exception as error:
            failure = from_exception(error)
            if events.started:
                await events.send(failure.body)
                await events.end()
                return
            response = failure.response()
        else:
            response = JSONResponse(whole)
        response.headers[TRACE_HEADER] = self._shape.id
        await response(scope, receive, send)

    async def _collect(self, generation: Generation) -> Json:
        pieces: list[str] = []
        finish_reason = "stop"
        async for token in generation:
            pieces.append(token.text)
            finish_reason = token.finish_reason or finish_reason
        return self._shape.whole("".join(pieces), finish_reason, _usage(generation, len(pieces)))

    async def _send_chunks(self, generation: Generation, events: _EventStream) -> None:
        num_tokens = 0
        finish_reason = "stop"
        async for token in generation:
            if num_tokens == 0:
                await events.send(*self._shape.first_chunks())
            num_tokens += 1
            finish_reason = token.finish_reason or finish_reason
            if token.text:
                await events.send(self._shape.text_chunk(token.text))
        await events.send(self._shape.last_chunk(finish_reason))
        if self._include_usage:
            await events.send(self._shape.usage_chunk(_usage(generation, num_tokens)))
        await events.end(b"data: [DONE]\n\n")


def _usage(generation: Generation, num_tokens: int) -> Usage:
    return Usage(prompt_tokens=generation.num_prompt_tokens, completion_tokens=num_tokens)


async def _cancel_on_disconnect(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


class _EventStream:
    """Server-sent events; the headers go out with the first one. A reader that stalls is a TimeoutError."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        self.started = False

    async def send(self, *objects: Json) -> None:
        if not self.started:
            self.started = True
            headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        for item in objects:
            data = json.dumps(item, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            await self._write(f"data: {data}\n\n".encode(), more=True)

    async def end(self, last: bytes = b"") -> None:
        await self._write(last, more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        async with asyncio.timeout(bounds.HTTP_WRITE_TIMEOUT_S):
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
