"""A unary connection that cannot be opened leaves nothing, and answers calls whose work was cancelled."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from swarm.network.libp2p import unary_connection
from swarm.network.libp2p.daemon_control import Control, read_message, write_message
from swarm.network.libp2p.unary_connection import BUSY, FAILED, UnaryAnswer, UnaryConnection
from swarm.network.multiaddr import peer_id_bytes
from swarm.network.peer_budgets import MAX_UNARY_BYTES
from swarm_protocol import limits
from swarm_protocol.identity import Identity
from swarm_protocol.proto import p2pd_pb2


@asynccontextmanager
async def answering(answer: UnaryAnswer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield the daemon's end of a connection at which `answer` answers calls."""
    near, far = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=far)
    connection = UnaryConnection(*await asyncio.open_unix_connection(sock=near))
    connection._answers["method"] = answer
    running = asyncio.create_task(connection.run())
    yield reader, writer
    writer.transport.abort()
    await running


def ask(writer: asyncio.StreamWriter, peer_id: str, call_id: bytes = b"call") -> None:
    request = p2pd_pb2.CallUnaryRequest(peer=peer_id_bytes(peer_id), proto="method", data=b"")
    write_message(writer, p2pd_pb2.PersistentConnectionResponse(callId=call_id, requestHandling=request))


async def next_answer(reader: asyncio.StreamReader) -> Any:
    return (await read_message(reader, p2pd_pb2.PersistentConnectionRequest)).unaryResponse


def test_opening_that_is_cancelled_closes_its_connection(tmp_path: Path) -> None:
    async def main() -> None:
        asked, closed = asyncio.Event(), asyncio.Event()

        async def silent_daemon(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            asked.set()
            await reader.read()
            closed.set()
            writer.close()

        path = str(tmp_path / "socket")
        async with await asyncio.start_unix_server(silent_daemon, path), asyncio.timeout(60):
            opening = asyncio.create_task(UnaryConnection.open(Control(path)))
            await asked.wait()
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            await closed.wait()

    asyncio.run(main())


def test_cancellation_is_sent_again_since_the_daemon_loses_one_that_comes_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler at the other side would otherwise go on, and hold one of this node's calls there."""
    monkeypatch.setattr(unary_connection, "CANCEL_AGAIN_S", 0.01)

    async def main() -> None:
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=far)
        connection = UnaryConnection(*await asyncio.open_unix_connection(sock=near))
        running = asyncio.create_task(connection.run())
        calling = asyncio.create_task(connection.call(Identity(bytes(32)).peer_id, "method", b""))
        async with asyncio.timeout(60):
            asked = await read_message(reader, p2pd_pb2.PersistentConnectionRequest)
            calling.cancel()
            for _ in range(2):
                cancelled = await read_message(reader, p2pd_pb2.PersistentConnectionRequest)
                assert cancelled.HasField("cancel")
                assert cancelled.callId == asked.callId
        writer.transport.abort()
        await running

    asyncio.run(main())


def test_caller_gets_an_error_when_the_handler_s_work_is_cancelled() -> None:
    """It would otherwise wait until its own deadline."""

    async def stopped(_peer_id: str, _request: bytes) -> bytes:
        work: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        work.cancel()  # as by an executor that is shut down
        return await work

    async def main() -> None:
        async with answering(stopped) as (reader, writer):
            ask(writer, Identity(bytes(32)).peer_id)
            async with asyncio.timeout(60):
                answer = await read_message(reader, p2pd_pb2.PersistentConnectionRequest)
            assert answer.unaryResponse.error == FAILED.encode()

    asyncio.run(main())


def test_second_call_with_the_id_of_one_under_way_is_refused_and_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger chooses the ids of its calls. With slots that stay taken, it would soon keep all peers out."""
    monkeypatch.setattr(limits, "MAX_CALLS_PER_PEER", 2)
    may_end = asyncio.Event()

    async def slow(_peer_id: str, _request: bytes) -> bytes:
        await may_end.wait()
        return b"answer"

    async def main() -> None:
        caller = Identity(bytes(32)).peer_id
        async with answering(slow) as (reader, writer), asyncio.timeout(60):
            for _ in range(3):
                ask(writer, caller, b"twin")
                ask(writer, caller, b"twin")
                assert (await next_answer(reader)).error == BUSY.encode()
                may_end.set()
                assert (await next_answer(reader)).response == b"answer"
                may_end.clear()
            ask(writer, caller, b"one")
            ask(writer, caller, b"two")
            may_end.set()
            assert [(await next_answer(reader)).response for _ in range(2)] == [b"answer"] * 2

    asyncio.run(main())


def test_call_of_a_peer_begins_before_the_many_calls_of_another_one() -> None:
    begun = []

    async def begin(peer_id: str, _request: bytes) -> bytes:
        begun.append(peer_id)
        return b""

    async def main() -> None:
        greedy, modest = (Identity(bytes([number]) * 32).peer_id for number in (1, 2))
        callers = [*[greedy] * limits.MAX_CALLS_PER_PEER, modest]
        async with answering(begin) as (reader, writer):
            for number, caller in enumerate(callers):
                ask(writer, caller, number.to_bytes(2, "big"))
            async with asyncio.timeout(60):
                for _ in callers:
                    await read_message(reader, p2pd_pb2.PersistentConnectionRequest)
            assert begun.index(modest) <= 1

    asyncio.run(main())


def test_peer_gets_no_more_answers_while_the_daemon_does_not_read_them() -> None:
    """They would otherwise wait in this process without a bound."""
    num_made = 0

    async def large(_peer_id: str, _request: bytes) -> bytes:
        nonlocal num_made
        num_made += 1
        return bytes(MAX_UNARY_BYTES)

    async def main() -> None:
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=far)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        connection = UnaryConnection(*await asyncio.open_unix_connection(sock=near))
        connection._answers["method"] = large
        running = asyncio.create_task(connection.run())
        peers = [Identity(bytes([number]) * 32).peer_id for number in (1, 2)]
        num_asked = 2 * limits.MAX_CALLS_PER_PEER
        for number in range(num_asked):
            ask(writer, peers[0], b"%d" % number)
        ask(writer, peers[1], b"other")
        async with asyncio.timeout(60):
            while not connection.num_calls(peers[1]):
                await asyncio.sleep(0.01)
            # the socket may have taken a few answers before all calls had come
            assert limits.MAX_CALLS_PER_PEER // 2 < connection.num_calls(peers[0]) <= limits.MAX_CALLS_PER_PEER
            assert num_made < num_asked
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            answers = [await read_message(reader, p2pd_pb2.PersistentConnectionRequest) for _ in range(num_asked + 1)]
            while connection.num_calls(peers[0]) or connection.num_calls(peers[1]):
                await asyncio.sleep(0.01)
        refused = [answer for answer in answers if answer.unaryResponse.error == BUSY.encode()]
        assert len(answers) == num_made + len(refused)
        assert b"other" in {answer.callId for answer in answers if not answer.unaryResponse.error}
        writer.transport.abort()
        await running

    asyncio.run(main())
