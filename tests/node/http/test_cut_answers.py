"""Tests of what a client receives of an answer that is cancelled as its server ends, if the client does not read or has
it all.
"""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send
from swarm.testing import virtual_time
from swarm_node.http.server import TELL_S, CutAnswers

STREAM = [(b"content-type", b"text/event-stream")]
SCOPE: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}


@pytest.mark.parametrize("headers", [STREAM, []])
def test_client_that_has_the_whole_answer_is_sent_nothing_more(headers: list[tuple[bytes, bytes]]) -> None:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"all", "more_body": False})
        await asyncio.Event().wait()  # as a task that frees its resources

    assert [message["type"] for message in cut(answer)] == ["http.response.start", "http.response.body"]


def test_client_that_does_not_read_is_waited_for_only_briefly_and_without_an_error() -> None:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await asyncio.Event().wait()

    assert [message["type"] for message in cut(answer, reads=1)] == ["http.response.start"]


def cut(answer: object, *, reads: int = 10) -> list[Message]:
    """Cancel the answer in the middle, and return what the client received.

    Fails if that ends with an error, or late.
    """
    taken: list[Message] = []

    async def send(message: Message) -> None:
        if len(taken) == reads:
            await asyncio.Event().wait()
        taken.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody asks")

    async def main() -> None:
        answering = asyncio.create_task(CutAnswers(answer)(SCOPE, receive, send))  # type: ignore[arg-type, func-returns-value]
        await asyncio.sleep(0.01)
        answering.cancel()
        async with asyncio.timeout(2 * TELL_S):
            await answering

    virtual_time.run(main())
    return taken
