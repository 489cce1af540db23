"""What travels over the streams of one reduction: openings, this member's slices of parts, and parts' results.

Whoever calls owns the stream. Encoding runs in the executor, unless the codec is so quick that a thread would only cost
time; a result is checked, which takes microseconds, as it comes. Shapes: N values of the vector.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar, cast

from swarm_compression import CodecError
from swarm_compression.codec import Data
from swarm_protocol.errors import PeerError, PeerRefused, PeerTimeout, PeerViolation, RoundError, SwarmError
from swarm_protocol.training_messages import ReduceOpening
from torch import Tensor

from swarm.network.failpoints import FaultHook
from swarm.network.framing import WINDOW_BYTES
from swarm.network.interface import EndOfStream, Stream
from swarm.training.allreduce.part_owner import Scheme
from swarm.training.allreduce.part_result import PartResult
from swarm.training.allreduce.parts import check_frame, num_values
from swarm.training.allreduce.peer_connections import QUIET_S, SILENT_S, PeerLines
from swarm.training.round.round_events import Signed

T = TypeVar("T")


class PartStreams:
    """One member's. `delta_N`: fp32, what it contributes; None: nothing."""

    def __init__(
        self,
        lines: PeerLines,
        signed: Signed,
        delta_N: Tensor | None,
        scheme: Scheme,
        executor: Executor,
        *,
        faults: FaultHook,
    ) -> None:
        self.me = lines.network.peer_id
        self.group = signed.group
        self.scheme = scheme
        self.faults = faults
        self.contributes = delta_N is not None
        self.bytes_sent = 0
        self._lines = lines
        self._heard_at = dict.fromkeys(signed.group.peer_ids, -math.inf)
        self._signed = signed
        self._delta_N = delta_N
        self._executor = executor
        on_cpu = delta_N is not None and delta_N.device.type == "cpu"
        self._encodes_at_once = on_cpu and scheme.feedback is None and scheme.codec.is_quick

    @asynccontextmanager
    async def open(self, peer: str, opening: ReduceOpening) -> AsyncIterator[Stream]:
        async with self._lines.network.stream(
            peer, self._lines.methods.reduce, timeout_s=self.group.reduce_s
        ) as stream:
            await self._send(stream, self._signed.data)
            await self._send(stream, opening.to_bytes())
            yield stream

    async def encoded(self, frame: slice) -> bytearray:
        """This member's slice for one frame. Raises RoundError."""
        buffer = self.buffer(frame)
        await self.encode(frame, buffer)
        return buffer

    async def encode(self, frame: slice, buffer: bytearray | memoryview) -> None:
        """Likewise, into `buffer`."""
        if self._encodes_at_once:
            self._encode(frame, buffer)
        else:
            await self.off_loop(self._encode, frame, buffer)

    def buffer(self, frame: slice) -> bytearray:
        """For the frame, encoded. All are made here, on the loop: what threads allocate, each in a heap of its own, is
        not given to others when it is free, and adds up."""
        return bytearray(self.scheme.codec.encoded_bytes(num_values(frame)))

    async def send_slices(
        self, stream: Stream, part: PartResult, first: int = 0, *, ahead: int | None = None, phase: str = ""
    ) -> None:
        """From frame `first` on, at most `ahead` frames further than the part's result is here."""
        for index in range(first, len(part.frames) if self.contributes else 0):
            if ahead is not None:
                await part.has(index - ahead + 1)
            await self._send_slice(stream, part, index)
            if phase:
                await self.faults.reached(phase)

    async def send_result(self, stream: Stream, part: PartResult, first: int = 0, *, phase: str = "") -> None:
        for index in range(first, len(part.frames)):
            await part.reached(index + 1)
            if phase and index == 0:
                await self.faults.reached(phase)
            await self._send(stream, part.frame(index))

    async def take_result(self, stream: Stream, part: PartResult, peer: str, first: int = 0) -> None:
        """What `peer` sends. Nobody but `peer` is to blame for bytes that cannot be decoded."""
        for index in range(first, len(part.frames)):
            part.put(index, await self._receive_result(stream, num_values(part.frames[index]), peer))

    def heard(self, peer: str) -> None:
        """A frame of `peer` has come."""
        self._heard_at[peer] = asyncio.get_running_loop().time()

    async def until_silent(self, peer: str) -> None:
        """Return once `peer` has sent nothing for QUIET_S, and leaves a call unanswered for longer than what is queued
        in front of it, on the line between the two, can take."""
        loop, codec = asyncio.get_running_loop(), self.scheme.codec
        queued_bytes = min(codec.encoded_bytes(max(self.group.part_values)), WINDOW_BYTES)
        while True:
            await asyncio.sleep(QUIET_S)
            asked_at = loop.time()
            if self._heard_at[peer] > asked_at - QUIET_S:
                continue
            line_s = min(self._lines.meter.line_s(peer, queued_bytes), self.group.reduce_s / 4)
            if not await self._lines.answers(peer, SILENT_S + line_s) and self._heard_at[peer] < asked_at:
                return

    async def expect(self, peer: str, receive: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `receive` gets from `peer`; it may be cancelled and called again. Raises PeerTimeout if `peer` is
        silent."""
        with suppress(TimeoutError):
            # most frames are about to come, and need no watch
            async with asyncio.timeout(QUIET_S / 10):
                return await receive()
        return await self.while_there(peer, receive())

    async def while_there(self, peer: str, work: Coroutine[Any, Any, T]) -> T:
        """What comes of `work`, which `peer` takes part in. Raises PeerTimeout if `peer` is silent before that."""
        working, watching = asyncio.create_task(work), asyncio.create_task(self.until_silent(peer))
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise silence_of(peer)
            return working.result()
        finally:
            working.cancel()
            watching.cancel()

    async def off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def _send_slice(self, stream: Stream, part: PartResult, index: int) -> None:
        # in a call of its own, so that nobody holds a slice that is out
        data = await self.encoded(part.frames[index])
        with blamed(part.owner):
            await self._send(stream, data)

    async def _receive_result(self, stream: Stream, num_values: int, peer: str) -> bytes:
        try:
            data = await stream.receive()
            self.heard(peer)
            check_frame(self.scheme.codec, data, num_values)
        except EndOfStream:
            raise PeerViolation("it sent too little of its result", peer_id=peer) from None
        except SwarmError as error:
            raise not_of_others(error, peer) from error
        except CodecError as error:
            raise PeerViolation(f"it sent a bad result: {error}", peer_id=peer) from error
        return data

    async def _send(self, stream: Stream, data: Data) -> None:
        # any buffer that stays as it is will do, and streams copy none
        await stream.send(cast("bytes", data))
        self.bytes_sent += len(data)

    def _encode(self, frame: slice, buffer: bytearray | memoryview) -> None:
        assert self._delta_N is not None
        try:
            if self.scheme.feedback is not None:
                buffer[:] = self.scheme.feedback.encode(self._delta_N[frame], frame.start)
            else:
                self.scheme.codec.encode_into(self._delta_N[frame], buffer)
        except CodecError as error:
            raise RoundError(f"this member's contribution cannot be encoded: {error}") from error


def silence_of(peer: str) -> PeerTimeout:
    """What is raised after `PartStreams.until_silent`."""
    return PeerTimeout("it sends nothing and answers nothing", peer_id=peer)


@contextmanager
def blamed(peer: str) -> Iterator[None]:
    """What `peer`'s stream raises inside is `peer`'s."""
    try:
        yield
    except PeerRefused as error:
        raise PeerError(f"it refuses its part: {error}", peer_id=peer) from error
    except SwarmError as error:
        raise not_of_others(error, peer) from error


def not_of_others(error: SwarmError, peer: str) -> SwarmError:
    """`error`, as it came over `peer`'s stream: that it blames another one proves nothing about the other.

    One that blames nobody is `peer`'s own, or it could give up one attempt after the other.
    """
    if isinstance(error, PeerError) and error.peer_id == peer:
        return error
    return PeerError(f"it gave up: {error.message}", peer_id=peer)
