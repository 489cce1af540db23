"""Accepts streams of peers, and runs a handler for each while its caller stays.

Its tasks run in a task group of the caller. `peer_methods` names the protocols, `libp2p_stream` defines how a stream
behaves, and `stream_resume` makes streams that go on over another connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from swarm_protocol import limits
from swarm_protocol.errors import PeerUnreachable, SwarmError
from swarm_protocol.proto import p2pd_pb2

from swarm.network.interface import StreamHandler, failure_for_caller, too_many_streams
from swarm.network.libp2p.daemon_control import ControlError, IncomingStreams, read_message
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_stream import LINGER_S, Libp2pStream
from swarm.network.libp2p.stream_resume import ID_BYTES, REQUEST, ResumableStreams
from swarm.network.multiaddr import addr_text, peer_id_text
from swarm.network.peer_budgets import PeerSlots, stream_slots

OPENING_TIMEOUT_S = 5.0
MAX_REFUSED_PER_PEER = 64
MAX_REFUSED = 1024
"""Maximum streams, of one peer and of all, whose openers are told at one time that there is no room. Each takes an open
file for up to LINGER_S. Further ones are closed without a word."""

QUIET_S = 15.0
"""After the handler has returned, a caller from which no frame comes for this time counts as gone. On a slow link,
other traffic may delay a frame by seconds."""

MAX_LINGER_S = 400.0
"""Maximum time for the last frames to reach a caller: more than a full window takes over the slowest link that a node
may have (see `traffic.MIN_BYTES_PER_S`)."""


class StreamServer:
    """Accepts streams that peers open, as many as `peer_budgets` allows, and runs the handler of each in a task."""

    def __init__(self, host: Host, tasks: asyncio.TaskGroup, resumable: ResumableStreams) -> None:
        self._host = host
        self._resumable = resumable
        self._handlers: dict[str, tuple[str, StreamHandler, int]] = {}  # by the name on the wire
        self._slots: PeerSlots[str] = stream_slots()
        self._refused = PeerSlots[str](per_peer=lambda: MAX_REFUSED_PER_PEER, in_all=MAX_REFUSED)
        self._resumes: PeerSlots[str] = stream_slots()
        self._incoming = IncomingStreams(tasks, self._serve_one)

    async def start(self) -> None:
        path = self._host.daemon.listen_socket
        await self._incoming.listen(path)
        await self._host.accept_streams(self._resumable.protocol, path)

    def close(self) -> None:
        self._incoming.close()

    async def serve(
        self, protocol: str, handler: StreamHandler, *, max_message_bytes: int = limits.MAX_MESSAGE_BYTES
    ) -> None:
        self._handlers[self._host.wire_name(protocol)] = protocol, handler, max_message_bytes
        await self._host.accept_streams(protocol, self._host.daemon.listen_socket)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                info: Any = await read_message(reader, p2pd_pb2.StreamInfo)
                peer_id = peer_id_text(info.peer)
                with contextlib.suppress(ValueError):  # an address of an unknown kind
                    self._host.note_connected(peer_id, addr_text(info.addr))
                if info.proto == self._host.wire_name(self._resumable.protocol):
                    await self._resume(peer_id, reader, writer)
                    return
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, ControlError):
            writer.transport.abort()
            return
        protocol, handler, max_bytes = self._handlers[info.proto]
        with contextlib.ExitStack() as slots:
            has_room = slots.enter_context(self._slots.taken(peer_id))
            may_linger = has_room or slots.enter_context(self._refused.taken(peer_id))
            try:
                if not may_linger or not await self._host.admits(peer_id, protocol):
                    return
                async with asyncio.timeout(OPENING_TIMEOUT_S):
                    stream_id = await reader.readexactly(ID_BYTES)
                if not has_room:
                    await _refuse(Libp2pStream(reader, writer, peer_id=peer_id, timeout_s=None))
                else:
                    raw = (reader, writer)
                    with self._resumable.accepted(raw, peer_id, stream_id, max_message_bytes=max_bytes) as stream:
                        await self._handle(stream, handler)
            except (SwarmError, TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                pass  # the caller has left, so the error cannot be sent
            finally:
                writer.transport.abort()

    async def _resume(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._resumes.taken(peer_id) as has_room:
            if not has_room or not await self._host.admits(peer_id, self._resumable.protocol):
                writer.transport.abort()
            else:
                self._resumable.offer(peer_id, await reader.readexactly(REQUEST.size), reader, writer)

    async def _handle(self, stream: Libp2pStream, handler: StreamHandler) -> None:
        """Run the handler while the caller stays, and send the caller its outcome."""
        pump = asyncio.create_task(stream.pump())
        handling = asyncio.create_task(_outcome(handler, stream.peer_id, stream))
        try:
            await asyncio.wait((pump, handling), return_when=asyncio.FIRST_COMPLETED)
            if handling.done():
                stream.end(handling.result())
                await _linger(stream, pump)
        except asyncio.CancelledError:
            stream.give_way(PeerUnreachable("the peer has closed"))
            raise
        finally:
            handling.cancel()
            pump.cancel()
            await asyncio.wait((pump, handling))


async def _linger(stream: Libp2pStream, pump: asyncio.Task[None]) -> None:
    """Wait until the caller has left, while frames from it show that it still receives what was sent."""
    loop = asyncio.get_running_loop()
    until, num_signs = loop.time() + MAX_LINGER_S, -1
    while not pump.done() and num_signs != stream.num_signs and loop.time() < until:
        num_signs = stream.num_signs
        await asyncio.wait((pump,), timeout=QUIET_S)


async def _refuse(stream: Libp2pStream) -> None:
    """Tell the caller that there is no room for its stream, and wait up to LINGER_S until it has left."""
    stream.give_way(too_many_streams())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await stream.pump()
    stream.abort()


async def _outcome(handler: StreamHandler, peer_id: str, stream: Libp2pStream) -> Exception | None:
    """Run the handler, and return the error for the caller if it raised one."""
    try:
        await handler(peer_id, stream)
    except Exception as error:
        return failure_for_caller(error, peer_id)
    return None
