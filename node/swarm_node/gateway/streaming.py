"""Answers one request from its running generations: at once, or token by token as server-sent events.

The whole life of the generations is inside `Answer.__call__`, so a client's disconnect, a stalled reader, a deadline or
a shutdown all end in the same place, where they are closed and their chains freed. The status is decided when the
first token is there: failures before it are plain errors, later ones an error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from swarm_node.gateway import http_limits
from swarm_node.gateway.api_errors import from_exception
from swarm_node.gateway.choice import Choice, Piece
from swarm_node.gateway.event_stream import DONE, EventStream
from swarm_node.gateway.merging import Step
from swarm_node.gateway.responses import Json, Shape, Usage

TRACE_HEADER = "x-swarm-trace"
CLIENT_GONE = 499
"""nginx's status for a client that has left."""


@dataclass(slots=True, kw_only=True)
class Running:
    """A request that is being answered: its steps as they come, and what it has used so far."""

    steps: AsyncIterator[Step]
    choices: Sequence[Choice]
    usage: Callable[[], Usage]


Begin = Callable[[Scope], AbstractAsyncContextManager[Running]]


class Answer(Response):
    """The response to one request. `begin` starts its generations; leaving its context frees them."""

    def __init__(self, shape: Shape, begin: Begin, *, stream: bool, include_usage: bool) -> None:
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
        events = EventStream(send, {TRACE_HEADER: self._shape.id})
        try:
            async with asyncio.timeout(http_limits.GENERATION_TIMEOUT_S), self._begin(scope) as running:
                if self._stream:
                    await self._send_chunks(running, events)
                    return
                whole = await self._collect(running)
        except Exception as error:
            failure = from_exception(error)
            failure.note(scope)
            if events.started:
                await events.send(failure.body)
                await events.end()
                return
            response = failure.response()
        else:
            response = JSONResponse(whole)
        response.headers[TRACE_HEADER] = self._shape.id
        await response(scope, receive, send)

    async def _collect(self, running: Running) -> Json:
        said: list[list[Piece]] = [[] for _ in running.choices]
        async for index, token in running.steps:
            said[index] += running.choices[index].push(token)
        wholes = [choice.whole(pieces) for choice, pieces in zip(running.choices, said, strict=True)]
        return self._shape.whole(wholes, running.usage())

    async def _send_chunks(self, running: Running, events: EventStream) -> None:
        async for index, token in running.steps:
            choice = running.choices[index]
            chunks = [self._shape.first_chunk(index)] if choice.num_tokens == 0 else []
            chunks += [self._shape.chunk(index, piece) for piece in choice.push(token)]
            if token.finish_reason:
                chunks.append(self._shape.last_chunk(index, choice.finish_reason))
            if shown := [chunk for chunk in chunks if chunk]:
                await events.send(*shown)
        if self._include_usage:
            await events.send(self._shape.usage_chunk(running.usage()))
        await events.end(DONE)


async def until_gone(receive: Receive, answering: Coroutine[Any, Any, Response]) -> Response:
    """The response. If the client leaves before it is there, `answering` is cancelled, and this says nothing."""
    task = asyncio.create_task(answering)
    watching = asyncio.create_task(_cancel_on_disconnect(receive, task))
    try:
        return await task
    except asyncio.CancelledError:
        if not watching.done() or watching.cancelled():
            raise
        return Response(status_code=CLIENT_GONE)
    finally:
        watching.cancel()


async def _cancel_on_disconnect(receive: Receive, task: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()
