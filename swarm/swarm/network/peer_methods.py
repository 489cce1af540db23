"""Calls and streams by method: those that this node makes to peers, and those that it serves.

`PeerMethods` maps each method to the protocol ids by which peers know it. `StreamServer` accepts the streams of peers,
and runs a handler for each while its caller stays. `calls` carries requests of any size, `stream_resume` makes streams
that go on over another connection, and `libp2p_stream` defines how a stream behaves. Tasks run in a task group of the
caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, SwarmError
from swarm_protocol.proto import p2pd_pb2

from swarm.network.interface import (
    NotServed,
    ServedMethods,
    Stream,
    StreamHandler,
    UnaryHandler,
    failure_for_caller,
    too_many_streams,
)
from swarm.network.libp2p.calls import TOKEN_BYTES, Calls
from swarm.network.libp2p.daemon_control import ControlError, IncomingStreams, read_message
from swarm.network.libp2p.greeting import explain_refusal, method_prefix
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_stream import LINGER_S, Libp2pStream
from swarm.network.libp2p.path_watch import PathWatch
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


class PeerMethods:
    """Calls peers and answers them. `start` it once, before anything is served."""

    def __init__(self, host: Host, tasks: asyncio.TaskGroup, watch: PathWatch, network_id: str) -> None:
        self._host = host
        self._network_id = network_id
        self._prefix = method_prefix(network_id)
        self.resumable = ResumableStreams(host, watch, self._name("resume", ""))
        self._server = StreamServer(host, tasks, self.resumable)
        self._calls = Calls(host, self.resumable.open)
        self._calls_served = ServedMethods[UnaryHandler]()
        self._streams_served = ServedMethods[StreamHandler]()

    async def start(self) -> None:
        await self._server.start()
        await self._server.serve(self._name("parcel", ""), self._calls.hand_out_parcel, max_message_bytes=TOKEN_BYTES)

    def close(self) -> None:
        self._server.close()

    async def call(self, peer_id: str, method: str, request: bytes, *, timeout_s: float, max_bytes: int) -> bytes:
        """Do as `Network.call`."""
        if len(request) > limits.MAX_MESSAGE_BYTES:
            raise ValueError(f"request of {len(request)} bytes, more than {limits.MAX_MESSAGE_BYTES}")
        names = (self._name("call", method), self._name("bulk", method), self._name("parcel", ""))
        async with self._asking(peer_id, method, timeout_s, f"no answer to {method!r}"):
            return await self._calls.call(peer_id, names, request, max_bytes)

    @contextlib.asynccontextmanager
    async def stream(self, peer_id: str, method: str, *, timeout_s: float | None) -> AsyncIterator[Stream]:
        """Do as `Network.stream`."""
        async with self._asking(peer_id, method, timeout_s, f"{method!r} was not opened"):
            raw = await self._host.open_stream(peer_id, self._name("stream", method))
        async with self.resumable.opened(raw, peer_id, timeout_s=timeout_s) as stream:
            yield stream

    @contextlib.asynccontextmanager
    async def _asking(self, peer_id: str, method: str, timeout_s: float | None, late: str) -> AsyncIterator[None]:
        """Bound the time of the body, and replace NotServed by its reason. `late` is the beginning of the PeerTimeout's
        message."""
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    yield
                except NotServed:
                    raise await explain_refusal(self._host, peer_id, self._network_id, method) from None
        except TimeoutError:
            raise PeerTimeout(f"{late} within {timeout_s:g} s", peer_id=peer_id) from None

    async def serve_streamed(self, protocol: str, answer: UnaryHandler, *, max_request_bytes: int) -> None:
        """Answer requests of `protocol` over streams, at most `calls.MAX_BULK_PER_PEER` of a peer at once."""
        handler = self._calls.bulk_handler(answer)
        await self._server.serve(protocol, handler, max_message_bytes=max_request_bytes)

    async def call_streamed(
        self, peer_id: str, protocol: str, request: bytes, *, timeout_s: float, max_bytes: int
    ) -> bytes:
        """Send a request of `protocol` to a peer over a stream. Raises SwarmError, NotServed, or TimeoutError after
        `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            return await self._calls.exchange(peer_id, protocol, request, max_bytes)

    async def serve(self, method: str, handler: UnaryHandler) -> None:
        """Do as `Network.serve`."""

        async def answer(peer_id: str, request: bytes) -> bytes:
            return await self._calls_served[method](peer_id, request)

        with self._calls_served.adding(method, handler) as is_new:
            if is_new:
                await self._server.serve(self._name("bulk", method), self._calls.bulk_handler(answer))
                await self._host.serve(self._name("call", method), self._calls.unary_answer(answer))

    async def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Do as `Network.serve_stream`."""

        async def answer(peer_id: str, stream: Stream) -> None:
            await self._streams_served[method](peer_id, stream)

        with self._streams_served.adding(method, handler) as is_new:
            if is_new:
                await self._server.serve(self._name("stream", method), answer)

    def release(self, *methods: str) -> None:
        """Do as `Network.release`."""
        self._calls_served.release(*methods)
        self._streams_served.release(*methods)

    def _name(self, kind: str, method: str) -> str:
        return f"{self._prefix}{kind}/{method}"


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
                raw = (reader, writer)
                if not has_room:
                    await _refuse(self._resumable.not_resumed(raw, peer_id))
                else:
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
