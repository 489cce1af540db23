"""A stream of messages over byte streams of the libp2p daemon: framing, credit, deadlines, typed failures, resuming.

`Libp2pStream.pump` is the one task that reads; the opener or acceptor of the stream owns it. Without a limit on the
download it never stops reading for longer than one turn of the loop, since credit bounds what the other side may send.
So this side notices at once when the other side leaves. An operation that need not wait uses no timer and no turn of
the loop.

A stream outlives the connection below it. When its byte stream ends without END or FAILURE, `pump` calls its
`Reconnect` for another one, and both sides send again what the other has not received. `stream_resume` makes such
streams and finds their byte streams. `kept_frames` keeps the frames to send again, and `framing` the messages that wait
to be received. `stream_buffers` reads and writes byte streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.errors import PeerError, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.failure_messages import decode_failure, encode_failure

from swarm.network import framing
from swarm.network.framing import Kind, UnreadMessages
from swarm.network.interface import EndOfStream, cut_off
from swarm.network.libp2p.kept_frames import ReceivedFrames, SentFrames
from swarm.network.libp2p.stream_buffers import ByteStream
from swarm.network.link_meter import MIN_MESSAGE_BYTES
from swarm.network.peer_budgets import UnreadBudget
from swarm.network.traffic import Traffic

_COPY_BYTES = 2**14
"""Up to this size, copying a message behind its header costs less than writing from two buffers."""

LINGER_S = 5.0
"""Time for the last frames of a side that leaves to reach the other side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A new byte stream on which a stream goes on. The other side has received `num_received` of this side's frames."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_received: int


Reconnect = Callable[[int], Awaitable[Resumed]]
"""`reconnect(num_received)` finds another byte stream, and tells the other side how many frames this side has received.
Raises PeerError if the stream cannot go on."""


class Libp2pStream:
    """One end of a stream of messages between two peers; it implements `Stream`. `pump` reads it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        timeout_s: float | None,
        sent: SentFrames,
        reconnect: Reconnect,
        traffic: Traffic | None = None,
        unread: UnreadBudget | None = None,
        max_message_bytes: int = limits.MAX_MESSAGE_BYTES,
    ) -> None:
        """With `timeout_s` None, sending and receiving wait for as long as the stream lasts.

        Frames that `sent` keeps are sent again over the byte stream that `reconnect` finds. Messages are counted in
        `traffic`, whose limits hold. Messages that wait to be received are charged to `unread`.
        """
        self._traffic = traffic or Traffic()
        self._wire = ByteStream(reader, writer, self._check_frame, self._accept, self._traffic)
        self.peer_id = sent.peer_id
        self._timeout_s = timeout_s
        self._unread = UnreadMessages(self, unread or UnreadBudget(), max_message_bytes)
        self._sent = sent
        self._reconnect = reconnect
        self._received = ReceivedFrames()
        self._coming_since_s = 0.0  # when the latest long piece began to come
        self._is_acknowledged = False  # whether an acknowledgement came since the last call of `acknowledge`
        self._send_credit = framing.WINDOW_BYTES
        self._changed = asyncio.Event()  # wakes who waits for a message, for credit, or for another byte stream
        self._finished = False
        self._is_in_message = False  # whether more pieces have to follow the last one that was sent
        self._error: SwarmError | None = None
        self.num_signs = 0
        """Number of frames that have come, including acknowledgements. While the other side takes data, at least one
        comes each second."""

    # --- what users of a stream see ---------------------------------------------------------------------------------

    async def send(self, message: bytes) -> None:
        if len(message) > limits.MAX_MESSAGE_BYTES:
            raise ValueError(f"message of {len(message)} bytes, more than {limits.MAX_MESSAGE_BYTES}")
        if self._finished and self._error is None:
            raise ValueError("send after finish")
        if self._is_in_message and self._error is None:
            raise cut_off(self.peer_id)
        is_out = self._send_at_once(message)
        if is_out and self._wire.is_idle:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                for kind, piece in () if is_out else framing.pieces(message):
                    await self._drain()
                    await self._spend(framing.cost(len(piece)))  # last: a cancelled wait must not cost credit
                    # a long message is copied piece by piece, so that only unacknowledged pieces of it are kept
                    is_long = len(message) > framing.CHUNK_BYTES
                    self._write_piece(kind, bytes(piece) if is_long and self._sent.can_resend else piece)
                await self._drain()
        except TimeoutError:
            # part of the message may have been sent, so the stream cannot go on
            self._fail(self._timed_out("took no more data"))
            raise self._timed_out("took no more data") from None

    async def receive(self) -> bytes:
        if (message := self._take_message()) is not None:
            return message
        if self._timeout_s is None:
            return await self._next_message()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._next_message()
        except TimeoutError:
            raise self._timed_out("sent nothing") from None

    async def finish(self) -> None:
        if self._finished or self._is_over:
            return
        if self._is_in_message:
            raise cut_off(self.peer_id)
        self._finished = True
        self._put(framing.frame(Kind.FINISH))

    # --- what the owner of the stream does --------------------------------------------------------------------------

    async def pump(self) -> None:
        """Read until the stream ends, or the other side breaks the protocol. Raises only CancelledError."""
        try:
            await self._wire.read()
            while await self._resume():
                await self._wire.read()
            self._fail(PeerUnreachable("the peer left the stream", peer_id=self.peer_id))
        except PeerViolation as violation:
            violation.peer_id = self.peer_id
            self._fail(violation)

    def end(self, error: BaseException | None = None) -> None:
        """Tell the other side that this side has ended, with `error` if it failed. `pump` must go on until the other
        side has received it."""
        if not self._is_over:
            last = framing.frame(Kind.END) if error is None else framing.frame(Kind.FAILURE, encode_failure(error))
            self._put(last)
            self._finished = True

    def leave(self) -> None:
        """Tell the other side that this side has left, and close the stream. Bytes already written are still sent;
        nothing more is received. Call it only after `pump` has ended."""
        self._over()
        # END would look to the handler as if this side had finished sending
        self._wire.leave(framing.frame(Kind.FAILURE, encode_failure(PeerUnreachable("the peer has left"))), LINGER_S)

    def abort(self) -> None:
        self._over()
        self._wire.abort()

    def break_off(self) -> None:
        """Abort the present byte stream, so that the stream goes on over another one."""
        self._wire.abort()

    @property
    def is_carried(self) -> bool:
        """Return whether there is a byte stream to write to and to read from."""
        return self._error is None and not self._wire.is_lost

    def acknowledge(self) -> bool:
        """Acknowledge the frames that have come, and return whether anything has come since the last call. To be called
        at least once a second: an idle peer then keeps no frames, and a peer that sends a long frame sees that the path
        works."""
        was_acknowledged, self._is_acknowledged = self._is_acknowledged, False
        if not self._received.has_progressed(self._wire.num_partial):
            return was_acknowledged  # acknowledgements are not answered, or two idle sides would never stop
        self._write_acknowledgement()
        return True

    def give_way(self, refusal: PeerError) -> None:
        """Send `refusal` to the other side, drop what is unread, and keep nothing that still comes."""
        if not self._is_over:
            self._put(framing.frame(Kind.FAILURE, encode_failure(refusal)))
            self._finished = True
        self._wire.drop_body()
        self._unread.drop()
        self._fail(refusal)

    def _over(self) -> None:
        self._fail(PeerUnreachable("the stream is closed", peer_id=self.peer_id))
        self._unread.drop()

    # ----------------------------------------------------------------------------------------------------------------

    def _check_frame(self, kind: Kind, length: int) -> bool:
        """Return whether to keep the body of a frame that begins to come. Raises PeerViolation."""
        if kind not in (Kind.MORE, Kind.DATA):
            return True
        if length >= MIN_MESSAGE_BYTES:
            self._coming_since_s = asyncio.get_running_loop().time()
        return self._unread.announce(length)

    def _accept(self, kind: Kind, length: int, body: bytes) -> None:
        self.num_signs += 1
        if kind == Kind.ACK:
            self._is_acknowledged = True
            self._sent.acknowledge(length)
            self._changed.set()
            return
        if self._received.count(len(body)) >= framing.ACK_BYTES:
            self._write_acknowledgement()
        match kind:
            case Kind.MORE | Kind.DATA:
                self._unread.add(kind, body)
                self._count_piece(length)
            case Kind.CREDIT:
                self._send_credit += length
                if self._send_credit > framing.WINDOW_BYTES:
                    raise PeerViolation("the peer granted more than it can have taken")
            case Kind.FINISH:
                self._unread.is_finished = True
            case Kind.FAILURE:
                self._fail(decode_failure(body, self.peer_id))
                self._wire.stop()
            case Kind.END:
                self._unread.is_finished = True
                self._fail(PeerUnreachable("the peer has ended the stream", peer_id=self.peer_id))
                self._wire.stop()
        self._changed.set()

    def _count_piece(self, num_bytes: int) -> None:
        self._traffic.received_in_turn(self.peer_id, num_bytes)
        if num_bytes >= MIN_MESSAGE_BYTES:
            self._traffic.links.received(self.peer_id, num_bytes, self._coming_since_s)

    def _write_acknowledgement(self) -> None:
        if self.is_carried:
            self._wire.write((self._received.acknowledgement(),), at_once=True)

    @property
    def _is_over(self) -> bool:
        # `pump` may set an error for the lost connection only in its next turn
        return self._error is not None or (self._wire.is_lost and not self._sent.can_resend)

    async def _resume(self) -> bool:
        """Go on over another byte stream. Return whether there is one."""
        if self._error is not None or not self._sent.can_resend:
            return False
        self._wire.is_lost = True  # so that nothing is written until there is another byte stream
        self._wire.abort()
        self._unread.cut_off()
        try:
            resumed = await self._reconnect(self._received.num_frames)
        except PeerError:
            return False
        if self._is_over:  # by now
            resumed.writer.transport.abort()
            return False
        self._wire = ByteStream(resumed.reader, resumed.writer, self._check_frame, self._accept, self._traffic)
        self._received.note_acknowledged()  # by `reconnect`
        for frame in self._sent.to_resend(resumed.num_received):
            self._wire.write(frame, at_once=False)
        self._changed.set()
        return True

    def _fail(self, error: SwarmError) -> None:
        if self._error is None:
            self._error = error
        self._sent.drop()
        self._changed.set()

    def _send_at_once(self, message: bytes) -> bool:
        """Send the message if that needs no waiting, which is the usual case. Return whether it was sent."""
        fits = len(message) <= framing.CHUNK_BYTES and framing.cost(len(message)) <= self._send_credit
        if not fits or self._error is not None or not (self._sent.has_room and self._wire.is_idle):
            return False
        self._send_credit -= framing.cost(len(message))
        self._write_piece(Kind.DATA, message)
        return True

    async def _spend(self, num_bytes: int) -> None:
        while self._error is None and not (num_bytes <= self._send_credit and self._sent.has_room):
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._send_credit -= num_bytes

    def _write_piece(self, kind: Kind, piece: bytes | memoryview) -> None:
        header = framing.HEADER.pack(kind, len(piece))
        self._is_in_message = kind is Kind.MORE
        self._traffic.sent_in_turn(self.peer_id, len(piece))
        if len(piece) <= _COPY_BYTES:
            self._put(header + piece, at_once=False)
        else:
            self._put(header, piece, at_once=False)

    def _put(self, *frame: bytes | memoryview, at_once: bool = True) -> None:
        """Write a frame, or only keep it until there is a byte stream again. Without `at_once` it waits for its
        turn."""
        self._sent.add(frame)
        if self._wire.is_lost:
            return
        if self._received.unacknowledged_cost >= framing.RIDING_ACK_BYTES:
            frame = (self._received.acknowledgement(), *frame)
        self._wire.write(frame, at_once=at_once)

    async def _drain(self) -> None:
        """Wait until the system has taken what was written, on this byte stream or a later one."""
        while True:
            wire = self._wire
            try:
                await wire.drained()
                return
            except ConnectionError:
                if self._error is not None or not self._sent.can_resend:
                    # `pump` may still find the other side's reason in bytes that came before the connection was lost
                    raise self._error or PeerUnreachable("the peer left the stream", peer_id=self.peer_id) from None
            while self._wire is wire and self._error is None:
                self._changed.clear()
                await self._changed.wait()

    async def _next_message(self) -> bytes:
        message = None
        while message is None:
            self._changed.clear()
            await self._changed.wait()
            message = self._take_message()
        return message

    def _take_message(self) -> bytes | None:
        """Return the next message, or None if it is not here yet. Raises what `receive` raises, once all messages are
        read."""
        try:
            message = self._unread.take()
        except PeerViolation as violation:
            self._fail(violation)
            raise
        if (num_bytes := self._unread.credit()) and not self._is_over:
            self._put(framing.credit(num_bytes))
        if message is not None:
            return message
        if self._unread.is_finished:
            raise EndOfStream
        if self._error is not None:
            raise self._error.with_traceback(None)
        return None

    def _timed_out(self, what: str) -> PeerTimeout:
        return PeerTimeout(f"the peer {what} within {self._timeout_s} s", peer_id=self.peer_id)
