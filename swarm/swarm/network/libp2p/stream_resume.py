"""Lets a stream go on over another connection: its opener asks for it by its id, and both say how much they have.

    every stream   opener: id, 16 bytes
    resume         opener: id, 16 bytes | frames received, 8 bytes big-endian
                   acceptor: 0, 1 byte | frames received, 8 bytes, or: 1, 1 byte | 0, 8 bytes: refused

An acceptor that has lost its connection may be the only one who knows: then it sends such a request itself, on which
the opener asks for its part, or refuses if it has left the stream. Ids are random and valid for one peer only. An
acceptor holds streams without a connection for HOLD_S, and bounds how many. `ResumableStreams` makes the streams of
both sides; what they send again belongs to `libp2p_stream`.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerUnreachable, PeerViolation

from swarm.network.interface import Stream
from swarm.network.libp2p.host import CONTROL_FAILURES, Host, RawStream
from swarm.network.libp2p.kept_frames import SentFrames
from swarm.network.libp2p.libp2p_stream import Libp2pStream, Reconnect, Resumed, Resumption
from swarm.network.libp2p.path_watch import PathWatch
from swarm.network.libp2p.reconnection import GRACE_S, HOLD_S, MIN_PAUSE_S
from swarm.network.rate import write

ID_BYTES = 16
REQUEST = struct.Struct(">16sQ")
ANSWER = struct.Struct(">BQ")
_ACCEPTED, _REFUSED = 0, 1

ANSWER_TIMEOUT_S = 3.0
"""Time for the acceptor to answer one request, before another is tried."""

MAX_HELD_PER_PEER = 64
MAX_HELD = 1024
"""Accepted streams without a connection. Each costs its handler; further ones end with their connection. What they keep
unread and unacknowledged is bounded by budgets."""

NUDGE_S = 0.3
"""Pause from which on the acceptor no longer expects that the opener asks by itself."""

_CHECK_S = 1.0
"""Longest pause between two looks whether the opener of a held stream is still there."""


def new_id() -> bytes:
    return os.urandom(ID_BYTES)


async def _ask(host: Host, protocol: str, peer_id: str, request: bytes) -> Resumed:
    """Ask for a stream once. Raises PeerUnreachable if it is refused, or one of CONTROL_FAILURES."""
    reader, writer = await host.control.open_stream(peer_id, host.wire_name(protocol))
    try:
        write(writer, request)
        status, num_received = ANSWER.unpack(await reader.readexactly(ANSWER.size))
    except BaseException:
        writer.transport.abort()
        raise
    if status != _ACCEPTED:
        writer.transport.abort()
        raise PeerUnreachable(f"peer {peer_id} does not hold the stream any more", peer_id=peer_id)
    return Resumed(reader=reader, writer=writer, num_received=num_received)


class ResumableStreams:
    """Makes the streams of one node that may go on over another connection, and hands new byte streams to them."""

    def __init__(self, host: Host, watch: PathWatch, protocol: str) -> None:
        """`protocol` is that of resuming. `watch` watches the paths of all streams."""
        self.protocol = protocol
        self._host = host
        self._watch = watch
        self._reconnector = watch.reconnector
        self._accepted: dict[tuple[str, bytes], AcceptedStream] = {}
        self._opened: dict[tuple[str, bytes], Libp2pStream] = {}
        self._num_held: Counter[str] = Counter()

    @asynccontextmanager
    async def open(self, peer_id: str, protocol: str, max_bytes: int) -> AsyncIterator[Stream]:
        """Open a stream without a deadline of its own, for a call, which has one deadline for everything."""
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
        """Run the stream of bytes that a peer has accepted as a stream of messages. While the context lasts, the peer
        may ask for another stream of bytes."""
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
        """Make a stream of messages of a stream of bytes that a peer has opened. The peer may resume it while the
        context lasts, and then it is closed. Raises PeerViolation if the peer has a stream of that id."""
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

    def _stream(
        self, raw: RawStream, peer_id: str, reconnect: Reconnect, timeout_s: float | None, max_message_bytes: int
    ) -> Libp2pStream:
        reader, writer = raw
        return Libp2pStream(
            reader,
            writer,
            peer_id=peer_id,
            timeout_s=timeout_s,
            traffic=self._host.traffic,
            unread=self._host.unread,
            resumption=Resumption(sent=SentFrames(peer_id, self._host.unacknowledged), reconnect=reconnect),
            max_message_bytes=max_message_bytes,
        )

    def _reopening(self, peer_id: str, stream_id: bytes) -> Reconnect:
        """Return the opener's `Reconnect` of a stream."""

        async def reopen(num_received: int) -> Resumed:
            request = REQUEST.pack(stream_id, num_received)
            try:
                async with asyncio.timeout(self._reconnector.patience_s(peer_id)):
                    while True:
                        await self._reconnector.reach_patiently(peer_id)
                        with suppress(TimeoutError, *CONTROL_FAILURES):  # this connection breaks, too
                            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                                return await _ask(self._host, self.protocol, peer_id, request)
                        await asyncio.sleep(MIN_PAUSE_S)
            except TimeoutError:
                raise PeerUnreachable(f"peer {peer_id} was not reached again", peer_id=peer_id) from None

        return reopen

    def offer(self, peer_id: str, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand a byte stream over to the stream that `request` names, or refuse it."""
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
        """Count a stream without a connection. Raises PeerRefused if there is no room for it."""
        if self._num_held[peer_id] >= MAX_HELD_PER_PEER or self._num_held.total() >= MAX_HELD:
            raise PeerRefused("too many streams wait for their peers", peer_id=peer_id)
        self._num_held[peer_id] += 1
        try:
            yield
        finally:
            self._num_held[peer_id] -= 1
            if not self._num_held[peer_id]:
                del self._num_held[peer_id]

    async def watch(self, peer_id: str, stream_id: bytes) -> None:
        """Return when the opener of a held stream is gone, or has left the stream. Reaches it meanwhile if it does not
        connect itself, as behind a NAT, and tells it that its stream has lost its connection."""
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


@asynccontextmanager
async def _pumped(stream: Libp2pStream) -> AsyncIterator[None]:
    """Read the stream until the context is left, and then leave it."""
    pump = asyncio.create_task(stream.pump())
    try:
        yield
    finally:
        pump.cancel()
        try:
            await asyncio.wait((pump,))
        except asyncio.CancelledError:  # again, while it leaves
            stream.abort()
            raise
        stream.leave()


class AcceptedStream:
    """One accepted stream. Its creator sets `break_off`, which ends its byte stream."""

    def __init__(self, streams: ResumableStreams, peer_id: str, stream_id: bytes) -> None:
        self.break_off: Callable[[], None] | None = None
        self._streams = streams
        self._peer_id = peer_id
        self._stream_id = stream_id
        self._offer: asyncio.Future[Resumed] = asyncio.get_running_loop().create_future()

    def take(self, resumed: Resumed) -> None:
        """Let the stream go on over this byte stream, even if it has not noticed yet that it lost the last one."""
        self.withdraw()
        self._offer.set_result(resumed)
        if self.break_off is not None:
            self.break_off()

    def withdraw(self) -> None:
        """Close a byte stream that was offered and not taken."""
        if self._offer.done():
            self._offer.result().writer.transport.abort()
            self._offer = asyncio.get_running_loop().create_future()

    async def reconnect(self, num_received: int) -> Resumed:
        """Wait, as the acceptor's `Reconnect`, until the opener resumes the stream. Raises PeerError."""
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
            watching.cancel()
            await asyncio.wait((watching,))
        resumed = self._offer.result()
        self._offer = asyncio.get_running_loop().create_future()
        return resumed
