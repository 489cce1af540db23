"""Lets a stream go on over another connection: its opener asks for it by its id, and both sides say what they have.

    every stream   opener: id, 16 bytes
    resume         opener: id, 16 bytes | frames received, 8 bytes big-endian
                   acceptor: 0, 1 byte | frames received, 8 bytes, or: 1, 1 byte | 0, 8 bytes: refused

If only the acceptor knows that the connection is lost, it sends such a request itself. The opener then resumes the
stream, or refuses if it has left the stream. Ids are random and valid for one peer only. An acceptor holds a stream
without a connection for up to HOLD_S, and bounds the number of such streams. `ResumableStreams` makes the streams of
both sides; `libp2p_stream` sends frames again.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NoReturn

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerUnreachable, PeerViolation

from swarm.ended_tasks import end_tasks
from swarm.held_counts import HeldCounts
from swarm.network.interface import Stream
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.host import Host, RawStream
from swarm.network.libp2p.kept_frames import SentFrames
from swarm.network.libp2p.libp2p_stream import Libp2pStream, Reconnect, Resumed
from swarm.network.libp2p.path_watch import PathWatch
from swarm.network.libp2p.reconnection import GRACE_S, HOLD_S, MIN_PAUSE_S
from swarm.network.rate import write

ID_BYTES = 16
REQUEST = struct.Struct(">16sQ")
ANSWER = struct.Struct(">BQ")
_ACCEPTED, _REFUSED = 0, 1

ANSWER_TIMEOUT_S = 3.0
"""Time for an answer to one request, before another one is sent."""

MAX_HELD_PER_PEER = 64
MAX_HELD = 1024
"""Maximum accepted streams without a connection, of one peer and of all peers. Each keeps a handler. Further streams
end with their connection. Budgets bound what they keep unread and unacknowledged."""

NUDGE_S = 0.3
"""Once its pauses are this long, the acceptor no longer expects the opener to ask by itself, and sends a request."""

_CHECK_S = 1.0
"""Maximum pause between two checks whether the opener of a held stream is still there."""


def new_id() -> bytes:
    return os.urandom(ID_BYTES)


async def _ask(host: Host, protocol: str, peer_id: str, request: bytes) -> Resumed:
    """Ask a peer once to resume a stream. Raises PeerUnreachable if it refuses, or one of CONTROL_FAILURES."""
    reader, writer = await host.control.open_stream(peer_id, host.wire_name(protocol))
    try:
        write(writer, request)
        status, num_received = ANSWER.unpack(await reader.readexactly(ANSWER.size))
    except BaseException:
        writer.transport.abort()
        raise
    if status != _ACCEPTED:
        writer.transport.abort()
        raise PeerUnreachable(f"peer {peer_id} no longer holds the stream", peer_id=peer_id)
    return Resumed(reader=reader, writer=writer, num_received=num_received)


class ResumableStreams:
    """Makes the streams of one node that can go on over another connection, and gives them new byte streams."""

    def __init__(self, host: Host, watch: PathWatch, protocol: str) -> None:
        """`protocol` is the protocol of requests to resume. `watch` watches the paths of all streams."""
        self.protocol = protocol
        self._host = host
        self._watch = watch
        self._reconnector = watch.reconnector
        self._accepted: dict[tuple[str, bytes], AcceptedStream] = {}
        self._opened: dict[tuple[str, bytes], Libp2pStream] = {}
        self._num_held = HeldCounts[str]()

    @asynccontextmanager
    async def open(self, peer_id: str, protocol: str, max_bytes: int) -> AsyncIterator[Stream]:
        """Open a stream for a call. The stream has no time-out of its own, since the call has a deadline."""
        raw = await self._host.open_stream(peer_id, protocol)
        async with self.opened(raw, peer_id, timeout_s=None, max_message_bytes=max_bytes) as stream:
            yield stream

    @asynccontextmanager
    async def opened(
        self,
        raw: RawStream,
        peer_id: str,
        *,
        timeout_s: float | None,
        max_message_bytes: int = limits.MAX_MESSAGE_BYTES,
    ) -> AsyncIterator[Stream]:
        """Make a stream of messages over a byte stream that a peer has accepted, and read it. While the context lasts,
        the peer may ask this side to resume the stream."""
        stream_id = new_id()
        write(raw[1], stream_id)
        stream = self._stream(raw, peer_id, self._reopening(peer_id, stream_id), timeout_s, max_message_bytes)
        self._opened[peer_id, stream_id] = stream
        try:
            with self._watch.watching(stream):
                async with _pumped(stream):
                    yield stream
        finally:
            del self._opened[peer_id, stream_id]

    @contextmanager
    def accepted(
        self, raw: RawStream, peer_id: str, stream_id: bytes, *, max_message_bytes: int
    ) -> Iterator[Libp2pStream]:
        """Make a stream of messages over a byte stream that a peer has opened. The peer may resume it while the context
        lasts; then it is closed. Raises PeerViolation if the peer already has a stream of that id."""
        key = (peer_id, stream_id)
        if key in self._accepted:
            raise PeerViolation("two streams have one id", peer_id=peer_id)
        accepted = self._accepted[key] = AcceptedStream(self, peer_id, stream_id)
        stream = self._stream(raw, peer_id, accepted.reconnect, None, max_message_bytes)
        accepted.break_off = stream.break_off
        try:
            with self._watch.watching(stream):
                yield stream
        finally:
            stream.abort()
            del self._accepted[key]
            accepted.withdraw()

    def not_resumed(self, raw: RawStream, peer_id: str) -> Libp2pStream:
        """Make a stream over a byte stream that a peer has opened, which ends with that byte stream."""
        return self._stream(raw, peer_id, _nowhere, None, limits.MAX_MESSAGE_BYTES)

    def _stream(
        self, raw: RawStream, peer_id: str, reconnect: Reconnect, timeout_s: float | None, max_message_bytes: int
    ) -> Libp2pStream:
        reader, writer = raw
        return Libp2pStream(
            reader,
            writer,
            timeout_s=timeout_s,
            traffic=self._host.traffic,
            unread=self._host.unread,
            sent=SentFrames(peer_id, self._host.unacknowledged),
            reconnect=reconnect,
            max_message_bytes=max_message_bytes,
        )

    def _reopening(self, peer_id: str, stream_id: bytes) -> Reconnect:
        """Return the `Reconnect` of a stream that this node opened."""

        async def reopen(num_received: int) -> Resumed:
            request = REQUEST.pack(stream_id, num_received)
            try:
                async with asyncio.timeout(self._reconnector.patience_s(peer_id)):
                    while True:
                        await self._reconnector.reach_patiently(peer_id)
                        with suppress(TimeoutError, *CONTROL_FAILURES):  # the new connection may break, too
                            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                                return await _ask(self._host, self.protocol, peer_id, request)
                        await asyncio.sleep(MIN_PAUSE_S)
            except TimeoutError:
                raise PeerUnreachable(f"peer {peer_id} was not reached again", peer_id=peer_id) from None

        return reopen

    def offer(self, peer_id: str, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give a byte stream to the accepted stream that `request` names. If this side opened the stream, have it
        resumed; else refuse the request."""
        stream_id, num_received = REQUEST.unpack(request)
        accepted = self._accepted.get((peer_id, stream_id))
        if accepted is not None:
            accepted.take(Resumed(reader=reader, writer=writer, num_received=num_received))
            return
        opened = self._opened.get((peer_id, stream_id))
        write(writer, ANSWER.pack(_ACCEPTED if opened else _REFUSED, 0))
        writer.close()
        if opened:
            opened.break_off()

    @contextmanager
    def held(self, peer_id: str) -> Iterator[None]:
        """Count a stream as without a connection while the context lasts. Raises PeerRefused if there is no room."""
        if self._num_held[peer_id] >= MAX_HELD_PER_PEER or self._num_held.total() >= MAX_HELD:
            raise PeerRefused("too many streams wait to be resumed", peer_id=peer_id)
        with self._num_held.holding(peer_id):
            yield

    async def watch(self, peer_id: str, stream_id: bytes) -> None:
        """Wait until the opener of a held stream is gone, or has left the stream. Meanwhile reach the opener if it does
        not connect by itself, and ask it to resume the stream."""
        pause_s = MIN_PAUSE_S
        with suppress(PeerUnreachable):
            while True:
                await self._reconnector.reach(peer_id)
                if pause_s >= NUDGE_S:
                    with suppress(TimeoutError, *CONTROL_FAILURES):
                        async with asyncio.timeout(ANSWER_TIMEOUT_S):
                            answer = await _ask(self._host, self.protocol, peer_id, REQUEST.pack(stream_id, 0))
                        answer.writer.transport.abort()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _CHECK_S)
        if self._reconnector.may_return(peer_id):
            await asyncio.sleep(GRACE_S)


async def _nowhere(_num_received: int) -> NoReturn:
    raise PeerUnreachable("the stream is not resumed")


@asynccontextmanager
async def _pumped(stream: Libp2pStream) -> AsyncIterator[None]:
    """Read the stream while the context lasts, and then leave it."""
    pump = asyncio.create_task(stream.pump())
    try:
        yield
    finally:
        pump.cancel()
        try:
            await asyncio.wait((pump,))
        except asyncio.CancelledError:  # cancelled while it waits for `pump`
            stream.abort()
            raise
        stream.leave()


class AcceptedStream:
    """The entry of `ResumableStreams` for an accepted stream. `break_off` aborts its byte stream; the creator sets
    it."""

    def __init__(self, streams: ResumableStreams, peer_id: str, stream_id: bytes) -> None:
        self.break_off: Callable[[], None] | None = None
        self._streams = streams
        self._peer_id = peer_id
        self._stream_id = stream_id
        self._offer: asyncio.Future[Resumed] = asyncio.get_running_loop().create_future()

    def take(self, resumed: Resumed) -> None:
        """Let the stream go on over this byte stream, even if the loss of the last one was not noticed yet."""
        self.withdraw()
        self._offer.set_result(resumed)
        if self.break_off is not None:
            self.break_off()

    def withdraw(self) -> None:
        """Close a byte stream that was offered and is not used yet."""
        if self._offer.done():
            self._offer.result().writer.transport.abort()
            self._offer = asyncio.get_running_loop().create_future()

    async def reconnect(self, num_received: int) -> Resumed:
        """Wait until the opener resumes the stream. This is the acceptor's `Reconnect`. Raises PeerError."""
        with self._streams.held(self._peer_id):
            resumed = await self._offered()
        write(resumed.writer, ANSWER.pack(_ACCEPTED, num_received))
        return resumed

    async def _offered(self) -> Resumed:
        watching = asyncio.create_task(self._streams.watch(self._peer_id, self._stream_id))
        try:
            while not self._offer.done():
                offer = self._offer
                done, _ = await asyncio.wait((offer, watching), timeout=HOLD_S, return_when=asyncio.FIRST_COMPLETED)
                if offer not in done:
                    raise PeerUnreachable("the peer left the stream", peer_id=self._peer_id)
        finally:
            await end_tasks(watching)
        resumed = self._offer.result()
        self._offer = asyncio.get_running_loop().create_future()
        return resumed
