"""Accepts the streams that the libp2p daemon passes to us, and runs a handler for each.

`StreamServer` owns the socket; its tasks live in the TaskGroup it is given. A handler is cancelled when its caller
leaves, and its outcome is told to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, SwarmError
from swarm_protocol.proto import p2pd_pb2

from swarm.network.interface import StreamHandler
from swarm.network.libp2p.binary_addr import peer_id_text
from swarm.network.libp2p.daemon_control import BACKLOG, ControlError, read_message
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_stream import Libp2pStream

OPENING_TIMEOUT_S = 5.0
LINGER_S = 5.0
"""How long a caller may take to leave after its handler has returned, so that the last messages still arrive."""

MAX_STREAMS_PER_PEER = 256
"""Each costs two open files and a task. What all of them hold unread is `unread_budget`'s to bound."""

logger = logging.getLogger(__name__)


class StreamServer:
    def __init__(self, host: Host, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks
        self._handlers: dict[str, tuple[StreamHandler, int]] = {}
        self._num_streams: Counter[str] = Counter()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        path = self._host.daemon.listen_socket
        self._server = await asyncio.start_unix_server(self._connected, path, backlog=BACKLOG)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def serve(
        self, protocol: str, handler: StreamHandler, *, max_message_bytes: int = limits.MAX_MESSAGE_BYTES
    ) -> None:
        self._handlers[protocol] = handler, max_message_bytes
        await self._host.accept_streams(protocol, self._host.daemon.listen_socket)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.create_task(self._serve_one(reader, writer))

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                info = await read_message(reader, p2pd_pb2.StreamInfo)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, ControlError):
            writer.transport.abort()
            return
        peer_id = peer_id_text(info.peer)
        handler, max_message_bytes = self._handlers[info.proto]
        stream = Libp2pStream(
            reader,
            writer,
            peer_id=peer_id,
            timeout_s=None,
            traffic=self._host.traffic,
            unread=self._host.unread,
            max_message_bytes=max_message_bytes,
        )
        self._num_streams[peer_id] += 1
        try:
            if self._num_streams[peer_id] > MAX_STREAMS_PER_PEER:
                stream.give_way(PeerRefused(f"more than {MAX_STREAMS_PER_PEER} streams are open", retry_after_s=1.0))
                await _until_left(stream)
            else:
                await self._run(stream, peer_id, handler)
        except SwarmError:
            pass  # the caller has left, so there is nobody to tell
        finally:
            stream.abort()
            self._num_streams[peer_id] -= 1
            if not self._num_streams[peer_id]:
                del self._num_streams[peer_id]

    async def _run(self, stream: Libp2pStream, peer_id: str, handler: StreamHandler) -> None:
        """Run `handler` for as long as the caller stays."""
        pump = asyncio.create_task(stream.pump())
        handling = asyncio.create_task(_outcome(handler, peer_id, stream))
        try:
            await asyncio.wait((pump, handling), return_when=asyncio.FIRST_COMPLETED)
            if handling.done():
                await stream.end(handling.result())
                await asyncio.wait((pump,), timeout=LINGER_S)
        finally:
            handling.cancel()
            pump.cancel()
            await asyncio.wait((pump, handling))


async def _until_left(stream: Libp2pStream) -> None:
    """Wait until the caller has heard why it was refused; not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await stream.pump()


async def _outcome(handler: StreamHandler, peer_id: str, stream: Libp2pStream) -> BaseException | None:
    """What the handler raised, to be told to the caller."""
    try:
        await handler(peer_id, stream)
    except SwarmError as error:
        return error
    except Exception as error:
        logger.exception("a stream handler failed")
        return error
    return None
