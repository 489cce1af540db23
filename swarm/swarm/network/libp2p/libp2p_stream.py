"""Streams of messages over byte streams of the libp2p daemon: framing, credit, deadlines, typed failures, accepting.

`Libp2pStream.pump` is the one task that reads; the opener or acceptor of the stream owns it. It never stops reading
for longer than one turn of the loop (credit bounds what it may be sent), so the other side's leaving is noticed at
once. An operation that need not wait takes no timer and no turn of the loop. `StreamServer` accepts streams and runs
their handlers in the task group that it is given. Protocol names belong to `libp2p_network`, bytes to
`stream_buffers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from typing import cast

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.failure_messages import decode_failure, encode_failure
from swarm_protocol.proto import p2pd_pb2

from swarm.network import framing
from swarm.network.framing import Kind
from swarm.network.interface import EndOfStream, StreamHandler, too_long
from swarm.network.libp2p.daemon_control import BACKLOG, ControlError, read_message
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.stream_buffers import StreamBuffers
from swarm.network.multiaddr import peer_id_text
from swarm.network.traffic import Traffic
from swarm.network.unread_budget import UnreadBudget

logger = logging.getLogger(__name__)


_GRANT_BYTES = framing.WINDOW_BYTES // 4
"""Credit goes back in steps of this size: often enough that the sender never waits in a steady flow."""

_COPY_BYTES = 2**14
"""Up to here copying a message behind its header costs less than to write from two places."""

OPENING_TIMEOUT_S = 5.0
LINGER_S = 5.0
"""Time that a caller has to leave after its handler has returned, so that the last messages still arrive."""
MAX_STREAMS_PER_PEER = 256
"""Each costs two open files and a task. What all of them hold unread is `unread_budget`'s to bound."""


class Libp2pStream:
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        peer_id: str,
        timeout_s: float | None,
        traffic: Traffic | None = None,
        unread: UnreadBudget | None = None,
        max_message_bytes: int = limits.MAX_MESSAGE_BYTES,
    ) -> None:
        """`timeout_s` None: sending and receiving wait for as long as the other side is there.

        `traffic` is counted, and what waits to be received is charged to `unread`.
        """
        self._reader = reader
        self._writer = writer
        self._wire = StreamBuffers(self._check_frame, self._accept)
        self.peer_id = peer_id
        self._timeout_s = timeout_s
        self._traffic = traffic or Traffic()
        self._unread = unread or UnreadBudget()
        self._max_message_bytes = max_message_bytes
        self._received: deque[tuple[Kind, bytes]] = deque()
        self._partial: list[bytes] = []
        self._num_partial_bytes = 0
        self._partial_cost = 0  # charged for `_partial`
        self._has_given_way = False
        self._send_credit = framing.WINDOW_BYTES
        self._unread_bytes = 0  # received and not yet granted again
        self._taken_bytes = 0  # taken by receive, to be granted in the next step
        self._changed = asyncio.Event()  # wakes receive
        self._granted = asyncio.Event()  # wakes send
        self._remote_finished = False
        self._finished = False
        self._error: SwarmError | None = None

    # --- what users of a stream see ---------------------------------------------------------------------------------

    async def send(self, message: bytes) -> None:
        if len(message) > limits.MAX_MESSAGE_BYTES:
            raise ValueError(f"message of {len(message)} bytes, more than {limits.MAX_MESSAGE_BYTES}")
        if self._finished:
            raise ValueError("send after finish")
        is_out = self._send_at_once(message)
        if is_out and self._wire.has_room:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                for kind, piece in () if is_out else framing.pieces(message):
                    await self._spend(framing.cost(len(piece)))
                    await self._drain()
                    self._write_piece(kind, piece)
                await self._drain()
        except TimeoutError:
            # part of the message may be out, so nothing more can be said on this stream
            self._fail(self._timed_out("took no more data"))
            raise self._timed_out("took no more data") from None

    async def receive(self) -> bytes:
        message = self._take_message()
        if message is not None:
            return message
        try:
            async with asyncio.timeout(self._timeout_s):
                while message is None:
                    self._changed.clear()
                    await self._changed.wait()
                    message = self._take_message()
        except TimeoutError:
            raise self._timed_out("sent nothing") from None
        return message

    async def finish(self) -> None:
        if self._finished or self._is_over:
            return
        self._finished = True
        self._writer.write(framing.frame(Kind.FINISH))
        await self._drain()

    # --- what the owner of the stream does --------------------------------------------------------------------------

    async def pump(self) -> None:
        """Read until the other side leaves or breaks the protocol. Never raises but CancelledError."""
        try:
            await self._wire.run(self._reader, cast("asyncio.Transport", self._writer.transport))
            self._fail(PeerUnreachable("the peer left the stream", peer_id=self.peer_id))
        except PeerViolation as violation:
            violation.peer_id = self.peer_id
            self._fail(violation)

    async def end(self, error: BaseException | None = None) -> None:
        """Tell the other side that this side has ended, and why if it failed."""
        if not self._is_over:
            last = framing.frame(Kind.END) if error is None else framing.frame(Kind.FAILURE, encode_failure(error))
            self._writer.write(last)
            self._finished = True
            await self._drain()

    def close(self) -> None:
        """Close the stream. Bytes already sent still leave; nothing more is received."""
        self._over()
        self._writer.close()

    def abort(self) -> None:
        self._over()
        self._writer.transport.abort()

    def give_way(self, refusal: PeerRefused) -> None:
        """Tell the other side why nothing more is taken, and drop what is unread; what still comes is not kept."""
        if not self._is_over:
            self._writer.write(framing.frame(Kind.FAILURE, encode_failure(refusal)))
            self._finished = True
        self._has_given_way = True
        self._wire.drop_body()
        self._forget()
        self._fail(refusal)

    def _over(self) -> None:
        self._fail(PeerUnreachable("the stream is closed", peer_id=self.peer_id))
        self._forget()

    def _forget(self) -> None:
        self._received.clear()
        self._partial.clear()
        self._num_partial_bytes = self._partial_cost = 0
        self._unread.drop(self)

    # ----------------------------------------------------------------------------------------------------------------

    def _check_frame(self, kind: Kind, length: int) -> bool:
        """Return whether the frame is to be kept."""
        if kind not in (Kind.MORE, Kind.DATA):
            return True
        if self._unread_bytes + framing.cost(length) > framing.WINDOW_BYTES:
            raise PeerViolation("the peer sent more than it was allowed to")
        if self._remote_finished:
            raise PeerViolation("the peer sent data after it had finished")
        self._unread_bytes += framing.cost(length)
        return not self._has_given_way and self._unread.charge(self, framing.cost(length))

    def _accept(self, kind: Kind, length: int, body: bytes) -> None:
        match kind:
            case Kind.MORE | Kind.DATA if self._has_given_way:
                pass  # a short one, of which some was here already
            case Kind.MORE | Kind.DATA:
                self._received.append((kind, body))
                self._traffic.received(self.peer_id, length)
            case Kind.CREDIT:
                self._send_credit += length
                if self._send_credit > framing.WINDOW_BYTES:
                    raise PeerViolation("the peer granted more than it can have taken")
                self._granted.set()
            case Kind.FINISH:
                self._remote_finished = True
            case Kind.FAILURE:
                self._fail(decode_failure(body, self.peer_id))
            case Kind.END:
                self._remote_finished = True
                self._fail(PeerUnreachable("the peer has ended the stream", peer_id=self.peer_id))
        self._changed.set()

    @property
    def _is_over(self) -> bool:
        # a lost connection becomes an error in the pump's next turn, and must not be written to before
        return self._error is not None or self._wire.is_lost

    def _fail(self, error: SwarmError) -> None:
        if self._error is None:
            self._error = error
        self._changed.set()
        self._granted.set()

    def _send_at_once(self, message: bytes) -> bool:
        """Send without waiting if possible, which is the usual case, and return whether it was done."""
        fits = len(message) <= framing.CHUNK_BYTES and framing.cost(len(message)) <= self._send_credit
        if not fits or self._error is not None or not self._wire.has_room:
            return False
        self._send_credit -= framing.cost(len(message))
        self._write_piece(Kind.DATA, memoryview(message))
        return True

    async def _spend(self, num_bytes: int) -> None:
        while self._send_credit < num_bytes:
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._granted.clear()
            await self._granted.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._send_credit -= num_bytes

    def _write_piece(self, kind: Kind, piece: memoryview) -> None:
        header = framing.HEADER.pack(kind, len(piece))
        self._traffic.sent(self.peer_id, len(piece))
        if len(piece) <= _COPY_BYTES:
            self._writer.write(header + piece)
        else:
            self._writer.writelines((header, piece))

    async def _drain(self) -> None:
        try:
            await self._wire.drained()
        except ConnectionError:
            # the pump may yet find the other side's reason in what it sent before it left
            raise self._error or PeerUnreachable("the peer left the stream", peer_id=self.peer_id) from None

    def _take_message(self) -> bytes | None:
        """The next one, or None if it is not there yet. Raises what `receive` does, once there is nothing more."""
        while self._received:
            message = self._take_piece()
            if message is not None:
                return message
        if self._remote_finished:
            raise EndOfStream
        if self._error is not None:
            raise self._error.with_traceback(None)
        return None

    def _take_piece(self) -> bytes | None:
        """The message that the next piece completes, else None."""
        kind, body = self._received.popleft()
        self._grant(framing.cost(len(body)))
        self._num_partial_bytes += len(body)
        self._partial_cost += framing.cost(len(body))
        if self._num_partial_bytes > self._max_message_bytes:
            self._forget()
            violation = too_long(self._max_message_bytes, self.peer_id)
            self._fail(violation)
            raise violation
        if kind == Kind.MORE:
            self._partial.append(body)
            return None
        message = b"".join((*self._partial, body)) if self._partial else body
        self._unread.release(self, self._partial_cost)
        self._partial.clear()
        self._num_partial_bytes = self._partial_cost = 0
        return message

    def _grant(self, num_bytes: int) -> None:
        self._taken_bytes += num_bytes
        if self._taken_bytes >= _GRANT_BYTES and not self._is_over:
            self._writer.write(framing.credit(self._taken_bytes))
            self._unread_bytes -= self._taken_bytes
            self._taken_bytes = 0

    def _timed_out(self, what: str) -> PeerTimeout:
        return PeerTimeout(f"the peer {what} within {self._timeout_s} s", peer_id=self.peer_id)


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
    """Return the error that the handler raised, to be sent to the caller."""
    try:
        await handler(peer_id, stream)
    except SwarmError as error:
        return error
    except Exception as error:
        logger.exception("a stream handler failed")
        return error
    return None
