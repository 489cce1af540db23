"""A stream within one process behaves like one between two."""

from __future__ import annotations

import asyncio

import pytest
from swarm.network.interface import EndOfStream
from swarm.serving.local_ends.local_ends import MAX_WAITING, LocalStream
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerUnreachable


def test_messages_arrive_in_order_and_a_sender_waits_for_room() -> None:
    async def scenario() -> None:
        near, far = LocalStream.pair()
        sending = asyncio.create_task(_send(near, MAX_WAITING + 1))
        await asyncio.sleep(1)
        assert not sending.done()
        assert [await far.receive() for _ in range(MAX_WAITING + 1)] == [bytes([n]) for n in range(MAX_WAITING + 1)]
        await sending
        await far.send(b"back")
        assert await near.receive() == b"back"

    virtual_time.run(scenario())


async def _send(stream: LocalStream, num_messages: int) -> None:
    for number in range(num_messages):
        await stream.send(bytes([number]))


def test_close_is_seen_after_waiting_messages_and_ends_a_blocked_sender() -> None:
    async def scenario() -> None:
        near, far = LocalStream.pair()
        sending = asyncio.create_task(_send(near, MAX_WAITING + 1))
        await far.send(b"last")
        await asyncio.sleep(1)
        await far.end(PeerRefused("enough"))
        await far.end()
        with pytest.raises(PeerUnreachable):
            await sending
        assert await near.receive() == b"last"
        with pytest.raises(PeerRefused, match="enough"):
            await near.receive()

    virtual_time.run(scenario())


def test_finish_lets_the_other_side_keep_sending() -> None:
    async def scenario() -> None:
        near, far = LocalStream.pair()
        await near.finish()
        with pytest.raises(EndOfStream):
            await far.receive()
        with pytest.raises(PeerUnreachable):
            await near.send(b"more")

    virtual_time.run(scenario())
