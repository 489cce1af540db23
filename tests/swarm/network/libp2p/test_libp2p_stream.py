"""One side of a stream over a socket. The other side is the test, which may cheat."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest
from swarm.network import framing
from swarm.network.libp2p import kept_frames
from swarm.network.libp2p.kept_frames import SentFrames
from swarm.network.libp2p.libp2p_stream import Libp2pStream, Resumed
from swarm.network.peer_budgets import UnreadBudget
from swarm_protocol.errors import PeerUnreachable, PeerViolation

MIB = 2**20


@asynccontextmanager
async def _stream(end: socket.socket, *, sent: SentFrames | None = None, **options: Any) -> AsyncIterator[Libp2pStream]:
    reader, writer = await asyncio.open_unix_connection(sock=end)
    sent = sent or SentFrames("other", UnreadBudget())
    stream = Libp2pStream(reader, writer, timeout_s=10, sent=sent, reconnect=_never, **options)
    pump = asyncio.create_task(stream.pump())
    try:
        yield stream
    finally:
        stream.abort()
        pump.cancel()
        await asyncio.wait((pump,))


def test_message_over_the_bound_is_read_at_most_a_window_beyond_it() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        async with _stream(near, max_message_bytes=2 * MIB) as receiver, _stream(far) as sender:
            sent = 0
            write = sender._write_piece

            def count(kind: framing.Kind, piece: memoryview) -> None:
                nonlocal sent
                sent += len(piece)
                write(kind, piece)

            sender._write_piece = count  # type: ignore[method-assign]
            sending = asyncio.create_task(sender.send(bytes(64 * MIB)))
            with pytest.raises(PeerViolation, match=f"more than {2 * MIB} bytes"):
                await receiver.receive()
            with pytest.raises(PeerViolation):  # what follows it is not accepted either
                await receiver.receive()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
            assert 2 * MIB < sent <= 2 * MIB + framing.WINDOW_BYTES

    asyncio.run(main())


def test_messages_do_not_count_as_unread_once_taken() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        budget = UnreadBudget()
        async with _stream(near, unread=budget) as receiver, _stream(far) as sender:
            for size in (5, framing.CHUNK_BYTES, 2 * framing.CHUNK_BYTES + 1):
                await sender.send(bytes(size))
                assert len(await receiver.receive()) == size
                assert budget.num_bytes == 0

    asyncio.run(main())


def test_message_that_is_cancelled_before_it_begins_costs_no_credit() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        async with _stream(near) as sender, _stream(far) as receiver:
            with mock.patch.object(sender, "_drain", asyncio.Event().wait):  # as while the line is full
                for _ in range(2 * framing.WINDOW_BYTES // framing.CHUNK_BYTES):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0):
                            await sender.send(bytes(framing.CHUNK_BYTES + 1))
            async with asyncio.timeout(5):
                await sender.send(bytes(framing.CHUNK_BYTES + 1))
                assert len(await receiver.receive()) == framing.CHUNK_BYTES + 1

    asyncio.run(main())


def test_finishing_does_not_wait_for_a_peer_that_takes_nothing() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        async with _stream(near) as sender:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await sender.send(bytes(framing.CHUNK_BYTES))  # more than the socket holds
            assert not sender._wire.is_idle
            async with asyncio.timeout(5):
                await sender.finish()
        far.close()

    asyncio.run(main())


async def _never(_num_received: int) -> Resumed:
    raise PeerUnreachable("there is no other byte stream")


def _is_of(part: object, message: bytearray) -> bool:
    return part is message or (isinstance(part, memoryview) and part.obj is message)


@pytest.mark.parametrize("is_kept", [True, False])
def test_message_is_sent_without_copies_except_for_the_kept_pieces_of_a_long_one(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_frames, "FIRST_WINDOW_BYTES", framing.WINDOW_BYTES)
    for never in ("ACK_BYTES", "RIDING_ACK_BYTES"):
        monkeypatch.setattr(framing, never, 2**30)

    async def main() -> None:
        near, far = socket.socketpair()
        usual, long = bytearray(100_000), bytearray(2 * framing.CHUNK_BYTES)
        sent = SentFrames("other", UnreadBudget())
        if not is_kept:
            sent.drop()
        async with _stream(near, sent=sent) as sender, _stream(far) as receiver:
            written, write = list[object](), sender._wire.write

            def note(frame: Sequence[bytes | memoryview], *, at_once: bool) -> None:
                written.extend(frame)
                write(frame, at_once=at_once)

            sender._wire.write = note  # type: ignore[method-assign]
            for message, num_pieces in ((usual, 1), (long, 2)):
                written.clear()
                await sender.send(message)
                num_uncopied = sum(_is_of(part, message) for part in written)
                assert num_uncopied == (0 if is_kept and message is long else num_pieces)
                assert await receiver.receive() == message
            if is_kept:
                kept = [part for frame in sent.to_resend(0) for part in frame]
                assert [_is_of(part, usual) for part in kept].count(True) == 1
                assert sum(map(len, kept)) > len(usual) + len(long)

    asyncio.run(main())


async def _until_heard(stream: Libp2pStream) -> None:
    async with asyncio.timeout(60):
        while not stream.acknowledge():
            await asyncio.sleep(0)


def test_sender_of_a_long_frame_gets_acknowledgements_and_answers_none_of_them() -> None:
    """A slow path must not be mistaken for a dead one, and two idle sides must not acknowledge each other for ever."""

    async def main() -> None:
        near, far = socket.socketpair()
        async with _stream(near) as sender, _stream(far) as receiver:
            body = bytes(100_000)
            sender._wire._writer.write(framing.HEADER.pack(framing.Kind.DATA, len(body)) + body[:50_000])
            await _until_heard(receiver)
            written = list[object]()
            sender._wire.write = lambda frame, **_: written.append(frame)  # type: ignore[method-assign]
            num_signs = sender.num_signs
            await _until_heard(sender)
            assert sender.num_signs == num_signs + 1
            assert not sender.acknowledge()
            assert written == []
            sender._wire._writer.write(body[50_000:])
            assert await receiver.receive() == body

    asyncio.run(main())
