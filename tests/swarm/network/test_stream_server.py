"""Tests of how long an accepted stream is kept after its handler has ended or has refused it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from swarm.network import framing, peer_budgets, peer_methods
from swarm.network.framing import Kind
from swarm.network.interface import EndOfStream, Stream
from swarm.network.libp2p.daemon_control import write_message
from swarm.network.libp2p.stream_resume import ID_BYTES, ResumableStreams
from swarm.network.multiaddr import addr_bytes, peer_id_bytes
from swarm.network.peer_budgets import UnreadBudget
from swarm.network.peer_methods import MAX_LINGER_S, QUIET_S, StreamServer
from swarm.network.traffic import Traffic
from swarm.testing import virtual_time
from swarm_protocol.identity import Identity
from swarm_protocol.proto import p2pd_pb2

TAKES_S = 60.0
STREAM_ID = b"\xff" * ID_BYTES
CALLER = Identity(bytes(32)).peer_id
CALLER_ADDR = "/ip4/44.10.20.30/tcp/4001"


def _server(*, is_member: bool = True) -> StreamServer:
    async def admits(_peer_id: str, _protocol: str) -> bool:
        return is_member

    noted = dict[str, str]()
    host: Any = SimpleNamespace(
        wire_name=lambda name: name,
        admits=admits,
        connected=noted,
        note_connected=noted.__setitem__,
        traffic=Traffic(),
        unread=UnreadBudget(),
        unacknowledged=UnreadBudget(),
    )
    watch: Any = SimpleNamespace(reconnector=None)
    tasks: Any = None
    return StreamServer(host, tasks, ResumableStreams(host, watch, "resume"))


class Caller:
    """The stream of a caller that reports every second, for a while, what it took, and then may leave."""

    def __init__(self, *, signs_s: float, leaves_s: float) -> None:
        self.peer_id = "caller"
        self.num_signs = 0
        self.has_left = False
        self._signs_s = signs_s
        self._leaves_s = leaves_s

    def end(self, _error: BaseException | None) -> None: ...

    async def pump(self) -> None:
        began_s = asyncio.get_running_loop().time()
        while (passed_s := asyncio.get_running_loop().time() - began_s) < self._leaves_s:
            await asyncio.sleep(1)
            self.num_signs += passed_s < self._signs_s
        self.has_left = True


@pytest.mark.parametrize(
    ("signs_s", "leaves_s", "has_left", "most_s"),
    [
        (TAKES_S, TAKES_S, True, TAKES_S + 1),
        (0.0, QUIET_S - 2, True, QUIET_S),
        (TAKES_S, MAX_LINGER_S, False, TAKES_S + 2 * QUIET_S + 1),
        (2 * MAX_LINGER_S, 2 * MAX_LINGER_S, False, MAX_LINGER_S + QUIET_S),
    ],
)
def test_stream_is_kept_while_its_caller_takes_what_the_handler_sent(
    signs_s: float, leaves_s: float, has_left: bool, most_s: float
) -> None:
    async def handler(_peer_id: str, _stream: Stream) -> None: ...

    async def main() -> None:
        caller: Any = Caller(signs_s=signs_s, leaves_s=leaves_s)
        async with asyncio.timeout(most_s):
            await _server()._handle(caller, handler)
        assert caller.has_left == has_left

    virtual_time.run(main())


async def refused(
    server: StreamServer, sent: bytes, protocol: str = "method"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Task[None]]:
    """Open a stream to a server that has no room, and send `sent`. Return its caller's end and the server's task."""

    async def handler(_peer_id: str, _stream: Stream) -> None:
        raise AssertionError("it was served")

    server._handlers["method"] = "method", handler, 0
    near, far = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=far)
    serving = asyncio.create_task(server._serve_one(*await asyncio.open_unix_connection(sock=near)))
    info = p2pd_pb2.StreamInfo(peer=peer_id_bytes(CALLER), addr=addr_bytes(CALLER_ADDR), proto=protocol)
    write_message(writer, info)
    writer.write(sent)
    return reader, writer, serving


def test_flood_of_streams_that_are_refused_takes_no_slots_and_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budgets, "MAX_STREAMS_PER_PEER", 0)
    monkeypatch.setattr(peer_methods, "MAX_REFUSED_PER_PEER", 2)

    async def main() -> None:
        server = _server()
        flood = [await refused(server, sent) for sent in (b"", STREAM_ID, b"", STREAM_ID, b"")]
        async with asyncio.timeout(60):
            for reader, _, _ in flood[2:]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            assert await flood[1][0].readexactly(framing.HEADER.size)
        assert [serving.done() for _, _, serving in flood] == [False] * 2 + [True] * 3
        assert server._slots.num_held == 0
        for _, writer, serving in flood:
            writer.transport.abort()
            await serving

    asyncio.run(main())


def test_refused_stream_is_kept_until_its_caller_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budgets, "MAX_STREAMS_PER_PEER", 0)

    async def main() -> None:
        reader, writer, serving = await refused(_server(), STREAM_ID)
        kind, length = framing.parse_header(await reader.readexactly(framing.HEADER.size))
        assert kind is Kind.FAILURE
        assert b"too many streams to the peer are open" in await reader.readexactly(length)
        writer.write(framing.frame(Kind.DATA, b"what was on its way") + framing.acknowledgement(1))
        await asyncio.sleep(0)
        assert not serving.done()
        writer.write(framing.frame(Kind.END))
        async with asyncio.timeout(60):
            await serving
        writer.transport.abort()

    asyncio.run(main())


def test_stranger_to_a_private_network_is_not_told_that_its_streams_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_budgets, "MAX_STREAMS_PER_PEER", 0)

    async def main() -> None:
        reader, writer, serving = await refused(_server(is_member=False), STREAM_ID)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            await serving
        writer.transport.abort()

    asyncio.run(main())


@pytest.mark.parametrize("end", [EndOfStream(), TimeoutError()])
def test_stream_logs_nothing_when_its_caller_leaves_or_is_silent(
    end: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(_peer_id: str, _stream: Stream) -> None:
        raise end

    with caplog.at_level(logging.INFO):
        caller: Any = Caller(signs_s=0.0, leaves_s=0.0)
        virtual_time.run(_server()._handle(caller, handler))
    assert caplog.records == []


@pytest.mark.parametrize("protocol", ["method", "resume"])
def test_address_of_a_caller_is_known_before_its_stream_is_served(protocol: str) -> None:
    """Otherwise a peer that has just connected, or connected again, would count for no provider's network."""

    async def main() -> None:
        server = _server(is_member=False)
        _, writer, serving = await refused(server, STREAM_ID, protocol)
        async with asyncio.timeout(60):
            await serving
        assert server._host.connected == {CALLER: CALLER_ADDR}
        writer.transport.abort()

    asyncio.run(main())
