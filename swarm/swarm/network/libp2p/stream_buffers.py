"""Reads the frames of one stream from a connection to the libp2p daemon, and tracks whether there is room to write.

`StreamBuffers` is an asyncio protocol instead of a StreamReader. So a frame is passed on in the same turn of the loop
in which its last byte came, without waking a task, and a long body is read directly into its own buffer. `ByteStream`
writes frames, too. `libp2p_stream` interprets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from swarm_protocol.errors import PeerViolation

from swarm.network import framing
from swarm.network.framing import Kind
from swarm.network.rate import Allowance, PacedWriter, write
from swarm.network.traffic import Traffic

SCRATCH_BYTES = 2**14
"""Bytes of the buffer for headers and short bodies: several messages of a model's server."""

SLICE_BYTES = 2**16
"""Maximum bytes of a long body that are read at once if the download is limited."""

MAX_FRAMES_AT_ONCE = 64
"""Maximum frames of one stream that are accepted at once; then the stream waits for the next turn of the loop. The
hundreds of streams that a stranger may have would keep all others waiting, since one read holds 3,000 empty frames, and
uvloop reads up to 32 times in a turn."""

_TAKEN_BYTES = 2**16
"""Maximum bytes taken at once from a StreamReader, which bounds the memory that is held twice."""


class StreamBuffers(asyncio.BufferedProtocol):
    """Calls `announced(kind, length)` before anything is allocated for a frame, which returns whether the frame is
    wanted, and then `accept(kind, length, body)` with the whole frame. Both may raise PeerViolation, which ends the
    reading. The bytes read are charged to `download`, and nothing is read while `download` has to wait. The task
    that runs `run` owns the object."""

    def __init__(
        self,
        announced: Callable[[Kind, int], bool],
        accept: Callable[[Kind, int, bytes], None],
        download: Allowance,
    ) -> None:
        self._announced = announced
        self._accept = accept
        self._download = download
        self._is_limited = download.is_limited
        self._is_paused = False
        self._scratch = bytearray(SCRATCH_BYTES)
        self._num_scratch = 0  # bytes in the scratch, of a frame that is not whole yet
        self._is_announced = False  # whether `announced` was called for that frame
        self._num_at_once = 0  # frames accepted since the stream last waited for a turn of the loop
        self._body = bytearray()  # the body of a frame that does not fit the scratch; empty if there is none
        self._num_body = 0
        self._num_unwanted = 0  # bytes still to come of an unwanted frame
        self._kind = Kind.DATA
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._room = asyncio.Event()
        self._room.set()
        self._transport: asyncio.Transport | None = None  # set by `run`
        self.is_lost = False  # whether the connection is lost, so that nothing can be written

    @property
    def has_room(self) -> bool:
        """Return whether `drained` would return at once. Valid only after `run` has started."""
        return self._transport is not None and self._room.is_set() and not self.is_lost

    @property
    def num_partial(self) -> int:
        """Return the number of bytes that have come of a frame that is not whole yet."""
        return self._num_body or self._num_scratch

    def stop(self) -> None:
        """End the reading, as if the other side had left."""
        self._end(None)

    async def run(self, reader: asyncio.StreamReader, transport: asyncio.Transport) -> None:
        """Take the connection over from `reader`, with the bytes that `reader` holds, and read until the other side
        leaves. Raises PeerViolation."""
        transport.pause_reading()
        transport.set_protocol(self)
        self._transport = transport
        self._is_paused = True
        if not transport.is_closing():  # on a closed transport uvloop would raise RuntimeError
            # a sender waits until the system has its message, so that this process no longer holds it
            transport.set_write_buffer_limits(high=0)
        try:
            for data in _unread(reader):
                if not transport.is_closing():
                    transport.pause_reading()  # `reader` resumes it once it has room
                await self._feed(data)
            if transport.is_closing():
                self.connection_lost(None)
            elif reader.at_eof():
                self.eof_received()
            self._is_paused = False
            transport.resume_reading()
            await self._ended
        finally:
            self._end(None)
            transport.pause_reading()

    def drop_body(self) -> None:
        """Drop the body that is coming, since it is no longer wanted."""
        self._num_unwanted += len(self._body) - self._num_body
        self._body, self._num_body = bytearray(), 0

    async def drained(self) -> None:
        """Wait until there is room to write. Raises ConnectionError if the connection is lost."""
        if self._transport is None:
            await asyncio.sleep(0)  # so that the task of `run` starts
        await self._room.wait()
        if self.is_lost:
            raise ConnectionError

    # --- what the loop calls ----------------------------------------------------------------------------------------

    def get_buffer(self, _sizehint: int) -> memoryview:
        if self._ended.done():
            return memoryview(self._scratch)  # these bytes are ignored
        if self._body:
            end = self._num_body + SLICE_BYTES if self._is_limited else len(self._body)
            return memoryview(self._body)[self._num_body : end]
        return memoryview(self._scratch)[self._num_scratch :]

    def buffer_updated(self, nbytes: int) -> None:
        self._try(self._advance, nbytes)
        if self._is_limited:
            self._download.charge(nbytes)
            if self._download.wait_s() > 0:
                self._pause()

    def eof_received(self) -> bool:
        self._end(None)
        return True  # keeps the connection open, so that queued bytes are still sent

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - however it was lost
        self.is_lost = True
        self._room.set()
        self._end(None)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    # ----------------------------------------------------------------------------------------------------------------

    async def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            place = self.get_buffer(-1)
            num_bytes = min(len(place), len(view))
            place[:num_bytes] = view[:num_bytes]
            self._advance(num_bytes)
            while self._is_behind and not self._ended.done():
                await asyncio.sleep(0)
                self._parse_on()
            view = view[num_bytes:]

    def _try(self, step: Callable[..., None], *arguments: int) -> None:
        """Run `step`, and end the reading if it finds a violation."""
        try:
            step(*arguments)
        except PeerViolation as violation:
            self._end(violation)

    def _advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more bytes in the buffer that `get_buffer` returned."""
        if self._ended.done():
            return
        if not self._body:
            self._num_scratch += num_bytes
            self._skip_unwanted()
            self._parse()
            return
        self._num_body += num_bytes
        if self._num_body == len(self._body):
            body, self._body = bytes(self._body), bytearray()
            self._accept(self._kind, len(body), body)
            # otherwise the loop would read all long bodies that have come before any task could take one
            self._pause()

    def _pause(self) -> None:
        """Stop reading until the next turn of the loop, or until the download allows more."""
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._transport is None or self._ended.done() or self._transport.is_closing():
            return
        if (wait_s := self._download.wait_s()) > 0:
            asyncio.get_running_loop().call_later(wait_s, self._read_on)
            return
        self._is_paused = False
        if self._is_behind:
            self._try(self._parse_on)
        if not (self._is_paused or self._ended.done()):
            self._transport.resume_reading()

    @property
    def _is_behind(self) -> bool:
        """Return whether the scratch may have more frames for the next turns."""
        return self._num_at_once == MAX_FRAMES_AT_ONCE

    def _parse_on(self) -> None:
        """Accept frames in a new turn of the loop."""
        self._num_at_once = 0
        self._parse()

    def _parse(self) -> None:
        """Accept the first whole frames in the scratch. The rest moves to its beginning, or to a separate body."""
        view, at = memoryview(self._scratch)[: self._num_scratch], 0
        while len(view) - at >= framing.HEADER.size and self._num_at_once < MAX_FRAMES_AT_ONCE:
            self._num_at_once += 1
            kind, length = framing.parse_header(view[at : at + framing.HEADER.size])
            is_wanted = self._is_announced or self._announced(kind, length)
            self._is_announced = False
            start = at + framing.HEADER.size
            num_bytes = framing.body_bytes(kind, length)
            if not is_wanted:
                at = min(start + num_bytes, len(view))
                self._num_unwanted = start + num_bytes - at
            elif start + num_bytes <= len(view):
                at = start + num_bytes
                self._accept(kind, length, bytes(view[start:at]))
            elif framing.HEADER.size + num_bytes > len(self._scratch):
                self._kind, self._body, self._num_body = kind, bytearray(num_bytes), len(view) - start
                self._body[: self._num_body] = view[start:]
                at = len(view)
            else:
                self._is_announced = True
                break
        self._num_scratch = len(view) - at
        self._scratch[: self._num_scratch] = view[at:]
        if self._is_behind:
            self._pause()

    def _skip_unwanted(self) -> None:
        """Drop bytes of an unwanted frame from the scratch."""
        num_bytes = min(self._num_unwanted, self._num_scratch)
        if num_bytes:
            self._num_unwanted -= num_bytes
            self._num_scratch -= num_bytes
            self._scratch[: self._num_scratch] = self._scratch[num_bytes : num_bytes + self._num_scratch]

    def _end(self, violation: PeerViolation | None) -> None:
        if self._ended.done():
            return
        if violation is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(violation)


class ByteStream(StreamBuffers):
    """Reads the frames of one byte stream, and writes frames to it in turn with other streams, within the limits of
    `traffic`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        announced: Callable[[Kind, int], bool],
        accept: Callable[[Kind, int, bytes], None],
        traffic: Traffic,
    ) -> None:
        super().__init__(announced, accept, traffic.download)
        self._reader = reader
        self._writer = writer
        self._outbox = PacedWriter(writer, traffic.turns)

    @property
    def is_idle(self) -> bool:
        """Return whether what is written now is sent at once."""
        return self.has_room and self._outbox.is_empty

    async def read(self) -> None:
        """Read until the other side leaves. Raises PeerViolation."""
        await self.run(self._reader, cast("asyncio.Transport", self._writer.transport))

    def write(self, frame: Sequence[bytes | memoryview], *, at_once: bool) -> None:
        self._outbox.write(frame, at_once=at_once)

    async def drained(self) -> None:
        await self._outbox.emptied()
        await super().drained()

    def leave(self, last: bytes, patience_s: float) -> None:
        """Write what is queued, and the `last` frame. Then close the byte stream once the other side has, or after
        `patience_s`."""
        self._outbox.flush()
        if not self.is_lost:
            write(self._writer, last)
            Leaving(self._writer, patience_s)

    def abort(self) -> None:
        self._writer.transport.abort()
        self._outbox.drop()


class Leaving(asyncio.Protocol):
    """Takes a connection over, and closes it once the other side has, or after `patience_s`, so that the written bytes
    still arrive."""

    def __init__(self, writer: asyncio.StreamWriter, patience_s: float) -> None:
        self._writer = writer  # kept, since it warns if it is deleted before its connection is closed
        transport = cast("asyncio.Transport", writer.transport)
        self._patience = asyncio.get_running_loop().call_later(patience_s, transport.abort)
        transport.set_protocol(self)
        transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - however it was lost
        self._patience.cancel()


def _unread(reader: asyncio.StreamReader) -> Iterator[bytes]:
    """Yield the bytes that `reader` holds, without waiting for more."""
    while not reader.at_eof():
        reading = reader.read(_TAKEN_BYTES)
        try:
            reading.send(None)
        except StopIteration as done:
            yield done.value
        except ConnectionError:
            return
        else:
            reading.close()  # the read would have to wait
            return
