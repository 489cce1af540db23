"""Talks to a running libp2p daemon (p2pd) over its unix control socket: one short connection a request.

Speaks the daemon's protocol (`swarm_protocol/proto/p2pd.proto`). Leaves persistent calls to `unary_connection`, and the
daemon's process to `p2pd_process`. `IncomingStreams` accepts the streams that the daemon passes to this process, and
runs a task for each. A stream's handler closes its connection. It is closed here where no handler can do so: when it
comes while the network closes, and when its task is cancelled before its first step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from swarm_protocol.proto import p2pd_pb2
from swarm_protocol.wire import encode_varint

from swarm.network.multiaddr import addr_bytes, addr_text, peer_id_bytes, peer_id_text
from swarm.network.rate import write

STREAM_BUFFER_BYTES = 1 << 20
"""Bytes that a reader buffers before it stops reading. asyncio's default of 64 KiB halves the throughput of large
messages."""

BACKLOG = 4096
"""Streams that the daemon may have passed to us while our loop was busy. It resets those that find no place, and their
callers would hear that we have left, not why they are refused; asyncio's default of 100 is less than one peer may have.
"""

MAX_CONTROL_MESSAGE_BYTES = 8 << 20
"""The daemon is our own child, yet a length prefix is never trusted with an allocation without a bound."""

MessageT = TypeVar("MessageT")

READ_AHEAD_BYTES = 1 << 16
"""asyncio's default. What is read ahead of a stream's messages is bounded by `peer_budgets`."""

StreamTask = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class ControlError(Exception):
    """The daemon answered a request with an error, in its own words."""


async def read_message(reader: asyncio.StreamReader, message_type: type[MessageT]) -> MessageT:
    """Raises IncompleteReadError at the end of the connection, ControlError for a length no daemon would send."""
    message: Any = message_type()
    message.ParseFromString(await read_delimited(reader, MAX_CONTROL_MESSAGE_BYTES))
    return message  # type: ignore[no-any-return]


async def read_delimited(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Return the bytes behind a varint with their number. Raises likewise."""
    size = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 35:
            break
    if size > max_bytes:
        raise ControlError(f"a message of {size} bytes was announced")
    return await reader.readexactly(size)


def write_message(writer: asyncio.StreamWriter, message: Any) -> None:
    encoded = message.SerializeToString()
    write(writer, encode_varint(len(encoded)) + encoded)


class Control:
    """Sends requests to one daemon: to connect, to open streams, to list peers and addresses."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path

    async def open(self, buffer_bytes: int = STREAM_BUFFER_BYTES) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._socket_path, limit=buffer_bytes)

    async def identify(self) -> tuple[str, tuple[str, ...]]:
        """Return our own peer id and the addresses that the daemon currently has, without /p2p."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        return peer_id_text(response.identify.id), _known(response.identify.addrs)

    async def connect(self, peer_id: str, addrs: Sequence[str] = ()) -> None:
        """Connect to a peer. Without `addrs` the daemon looks the peer up. Raises ControlError with the dial's
        failures."""
        request = p2pd_pb2.ConnectRequest(peer=peer_id_bytes(peer_id), addrs=[addr_bytes(addr) for addr in addrs])
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request))

    async def disconnect(self, peer_id: str) -> None:
        """Close every connection to a peer, and so every stream. Succeeds even if there is none."""
        request = p2pd_pb2.DisconnectRequest(peer=peer_id_bytes(peer_id))
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=request))

    async def connected_peers(self) -> dict[str, tuple[str, ...]]:
        """Return the peers with an open connection, and the remote addresses of all connections to each."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        found: dict[str, tuple[str, ...]] = {}
        for peer in response.peers:  # one entry a connection
            peer_id = peer_id_text(peer.id)
            found[peer_id] = (*found.get(peer_id, ()), *_known(peer.addrs))
        return found

    async def accept_streams(self, protocol: str, listen_path: str) -> None:
        """Have the daemon connect to the unix socket `listen_path` for each incoming stream of `protocol`."""
        addr = addr_bytes(f"/unix{listen_path}")
        request = p2pd_pb2.StreamHandlerRequest(addr=addr, proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request))

    async def open_stream(
        self, peer_id: str, protocol: str, buffer_bytes: int = STREAM_BUFFER_BYTES
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream, whose writer the caller closes."""
        reader, writer = await self.open(buffer_bytes)
        try:
            request = p2pd_pb2.StreamOpenRequest(peer=peer_id_bytes(peer_id), proto=[protocol])
            write_message(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request))
            raise_if_error(await read_message(reader, p2pd_pb2.Response))
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def _ask(self, request: Any) -> Any:
        reader, writer = await self.open()
        try:
            write_message(writer, request)
            response = await read_message(reader, p2pd_pb2.Response)
        finally:
            writer.transport.abort()
        raise_if_error(response)
        return response


def _known(addrs: Iterable[bytes]) -> tuple[str, ...]:
    """Return the addresses as text, without those that have parts unknown to this program."""
    known = []
    for raw in addrs:
        with contextlib.suppress(ValueError):
            known.append(addr_text(raw))
    return tuple(known)


def raise_if_error(response: Any) -> None:
    if response.type == p2pd_pb2.Response.ERROR:
        raise ControlError(response.error.msg)


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
