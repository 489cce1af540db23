"""Sends requests to a running libp2p daemon (p2pd) over its unix control socket, each over a connection of its own.

It uses the daemon's protocol (`swarm_protocol/proto/p2pd.proto`). `unary_connection` has the persistent connection for
calls, and `p2pd_process` the daemon's process. `IncomingStreams` accepts the streams that the daemon passes to this
process, and runs a task for each. The handler of a stream closes its connection. `IncomingStreams` closes it only if no
handler can: when the stream comes while the network closes, or when its task is cancelled before its first step.
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
"""Bytes that a reader of an opened stream buffers before it stops reading. asyncio's default of 64 KiB halves the
throughput of large messages."""

BACKLOG = 4096
"""Streams that may wait to be accepted while the loop is busy. The daemon resets a stream that finds no place, so that
its caller learns no reason. asyncio's default of 100 is less than the streams that one peer may open."""

MAX_CONTROL_MESSAGE_BYTES = 8 << 20
"""Maximum bytes of a message from the daemon. The daemon is a child of this process, but even so no length prefix is
trusted without a bound."""

MessageT = TypeVar("MessageT")

READ_AHEAD_BYTES = 1 << 16
"""Bytes that a reader of an accepted stream buffers, as by asyncio's default. `peer_budgets` bounds what is read of its
messages."""

StreamTask = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class ControlError(Exception):
    """The daemon answered a request with an error, whose text this is."""


async def read_message(reader: asyncio.StreamReader, message_type: type[MessageT]) -> MessageT:
    """Read one message. Raises IncompleteReadError at the end of the connection, and ControlError for a length that no
    daemon sends."""
    message: Any = message_type()
    message.ParseFromString(await read_delimited(reader, MAX_CONTROL_MESSAGE_BYTES))
    return message  # type: ignore[no-any-return]


async def read_delimited(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Read a length as a varint, then that many bytes, and return these. Raises IncompleteReadError, or ControlError
    for more than `max_bytes`."""
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
        """Return the host's own peer id and its present addresses, without /p2p."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        return peer_id_text(response.identify.id), _known(response.identify.addrs)

    async def connect(self, peer_id: str, addrs: Sequence[str] = ()) -> None:
        """Connect to a peer. Without `addrs` the daemon uses those that it knows. Raises ControlError with the failures
        of the dials."""
        request = p2pd_pb2.ConnectRequest(peer=peer_id_bytes(peer_id), addrs=[addr_bytes(addr) for addr in addrs])
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request))

    async def disconnect(self, peer_id: str) -> None:
        """Close every connection to a peer, and so every stream. Do nothing if there is none."""
        request = p2pd_pb2.DisconnectRequest(peer=peer_id_bytes(peer_id))
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=request))

    async def connected_peers(self) -> dict[str, tuple[str, ...]]:
        """Return the peers with an open connection, and the remote addresses of all connections to each."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        found: dict[str, list[str]] = {}
        for peer in response.peers:  # one entry a connection, of which a stranger can have thousands
            found.setdefault(peer_id_text(peer.id), []).extend(_known(peer.addrs))
        return {peer_id: tuple(addrs) for peer_id, addrs in found.items()}

    async def accept_streams(self, protocol: str, listen_path: str) -> None:
        """Have the daemon connect to the unix socket `listen_path` for each incoming stream of `protocol`."""
        addr = addr_bytes(f"/unix{listen_path}")
        request = p2pd_pb2.StreamHandlerRequest(addr=addr, proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request))

    async def open_stream(
        self, peer_id: str, protocol: str, buffer_bytes: int = STREAM_BUFFER_BYTES
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream. The caller must close its writer."""
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
    """Return the addresses as text, without those that have unknown parts."""
    known = []
    for raw in addrs:
        with contextlib.suppress(ValueError):
            known.append(addr_text(raw))
    return tuple(known)


def raise_if_error(response: Any) -> None:
    if response.type == p2pd_pb2.Response.ERROR:
        raise ControlError(response.error.msg)


class IncomingStreams:
    """Runs `serve` as a task in `tasks` for each incoming stream, until it is closed or `tasks` are cancelled. A reader
    buffers `limit` bytes."""

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
        """Accept no further stream. Streams that have a task go on. Idempotent."""
        self._closed.set()
        if self._server is not None:
            self._server.close()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed.is_set():
            writer.transport.abort()
            return
        serving = self._serve(reader, writer)
        try:
            task = self._tasks.create_task(serving)
        except RuntimeError:  # the tasks were cancelled in this turn of the loop
            serving.close()
            writer.transport.abort()
            return
        # a task that is cancelled before its first step does not run its own `finally`
        task.add_done_callback(lambda ended: writer.transport.abort() if ended.cancelled() else None)

    async def _close_with_tasks(self) -> None:
        """Close when `tasks` are cancelled. A stream that came later would not be cancelled, but its task would be
        waited for."""
        try:
            await self._closed.wait()
        finally:
            self.close()
