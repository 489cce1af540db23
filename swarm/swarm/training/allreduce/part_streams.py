"""Sends and receives the messages on the streams of one reduction: openings, this member's slices of parts, and parts'
results.

The caller owns the stream. Encoding runs in the executor, unless the codec is so quick that handing it to a thread
takes longer. A result is checked as it arrives, which takes microseconds. Shapes: N values of the vector.
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
from swarm_protocol.errors import (
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    PeerViolation,
    RoundError,
    SwarmError,
)
from swarm_protocol.hash_tree import HashTree
from swarm_protocol.reduction_messages import OpeningKind, ReduceOpening
from swarm_protocol.training_messages import SignedGroup
from torch import Tensor

from swarm.network.framing import WINDOW_BYTES
from swarm.network.interface import EndOfStream, FailpointHook, Stream, no_failpoints
from swarm.threads import in_executor
from swarm.training.allreduce.parts import (
    FRAME_VALUES,
    PartResult,
    ReductionScheme,
    check_frame,
    encode_slice_into,
    num_values,
    part_leaves,
)
from swarm.training.allreduce.peer_connections import QUIET_S, SILENT_S, PeerConnections

T = TypeVar("T")

INBOX_FRAMES = 16
"""Maximum frames received and not yet taken: more than members send ahead (see `butterfly.Exchange`)."""


SOON_S = QUIET_S / 10
"""Seconds for which a frame is awaited before this member checks whether its sender is there."""

SLICES_SHARE, RESULTS_SHARE, AUDITS_SHARE = 0.6, 0.7, 0.95
"""Shares of a reduction's time after which an owner names the member whose slices it lacks, the others name an owner
whose result they lack, and auditors name a member that does not show how it made a part. An attempt that ends without
a name ends in the same way the next time."""


class PartStreams:
    """One member's streams in one reduction. `delta_N` is its contribution in fp32; None if it contributes nothing, as
    when the group has it without tokens."""

    def __init__(
        self,
        connections: PeerConnections,
        signed: SignedGroup,
        delta_N: Tensor | None,
        scheme: ReductionScheme,
        executor: Executor,
        *,
        tree: HashTree | None = None,
        failpoints: FailpointHook = no_failpoints,
    ) -> None:
        """Set up the streams. `tree` is the hash tree of the contribution, to whose root this member has committed."""
        self.me = connections.network.peer_id
        self.signed = signed
        self.group = signed.group
        if not self.group.members[self.group.peer_ids.index(self.me)].num_tokens:
            delta_N = None
        self.tree = tree if delta_N is not None else None
        self.scheme = scheme
        self.failpoints = failpoints
        self.contributes = delta_N is not None
        self.bytes_sent = 0
        self._connections = connections
        self._began_at = asyncio.get_running_loop().time()
        self.heard_at = dict.fromkeys(signed.group.peer_ids, -math.inf)
        """The loop's time at which the latest frame of each member arrived; -inf if none has."""
        self._is_silent = {peer: asyncio.Event() for peer in signed.group.peer_ids}
        self._delta_N = delta_N
        self._executor = executor
        on_cpu = delta_N is not None and delta_N.device.type == "cpu"
        self._encodes_at_once = on_cpu and scheme.feedback is None and scheme.codec.is_quick

    def drop_contribution(self) -> None:
        """Encode no more slices, since the step is over. This frees 4 bytes for each parameter."""
        self._delta_N = None

    @asynccontextmanager
    async def open(self, peer: str, opening: ReduceOpening) -> AsyncIterator[Stream]:
        """Open a stream to `peer`. Raises PeerError, also if `peer` ends the stream while the caller waits for a
        message."""
        network, method = self._connections.network, self._connections.methods.reduce
        try:
            async with network.stream(peer, method, timeout_s=self.group.reduce_s) as stream:
                await self.send(stream, opening.to_bytes())
                yield stream
        except EndOfStream:
            raise PeerError(f"it ended its {opening.kind} stream without an answer", peer_id=peer) from None

    def opening(self, kind: OpeningKind, part: int, *, frame: int = 0, proof: bytes = b"") -> ReduceOpening:
        """Return the opening of a stream of this reduction."""
        digest = self.signed.digest
        return ReduceOpening(kind=kind, part=part, step=self.group.step, group_digest=digest, frame=frame, proof=proof)

    def slices_opening(self, kind: OpeningKind, part: int) -> ReduceOpening:
        """Return the opening of a stream on which this member's slices of `part` follow."""
        return self.opening(kind, part, proof=self.own_proof(part))

    def own_proof(self, part: int) -> bytes:
        """Return the proof that the leaves of this member's slices of `part`, together with their digests, are under
        the root that it committed to; empty if it contributes nothing."""
        if self.tree is None:
            return b""
        leaves = part_leaves(self.group, part)
        return b"".join(self.tree.proof(leaves.start, leaves.stop))

    def inbox(self, peer: str) -> FrameInbox:
        """Return an inbox for the slices that `peer` sends."""
        return FrameInbox(peer, self.heard, self.scheme.codec.encoded_bytes(FRAME_VALUES))

    async def encoded(self, frame: slice) -> bytearray:
        """Return this member's encoded slice of one frame. Raises RoundError."""
        buffer = self.buffer(frame)
        await self.encode(frame, buffer)
        return buffer

    async def encode(self, frame: slice, buffer: bytearray | memoryview) -> None:
        """Encode this member's slice of one frame into `buffer`. Raises RoundError."""
        if self._encodes_at_once:
            self._encode(frame, buffer)
        else:
            await self.off_loop(self._encode, frame, buffer)

    def buffer(self, frame: slice) -> bytearray:
        """Return a buffer for the encoded frame. Buffers are allocated here, on the loop: threads allocate each in a
        heap of its own, whose free memory others cannot use."""
        return bytearray(self.scheme.codec.encoded_bytes(num_values(frame)))

    async def send_slices(
        self, stream: Stream, part: PartResult, first: int = 0, *, ahead: int | None = None, phase: str = ""
    ) -> None:
        """Send this member's slices from frame `first` on, at most `ahead` frames before the part's result."""
        for index in range(first, len(part.frames) if self.contributes else 0):
            if ahead is not None:
                await part.wait_for_frames(index - ahead + 1, ignore_failure=True)
            await self._send_slice(stream, part, index)
            if phase:
                await self.failpoints.reached(phase)

    async def send_result(self, stream: Stream, part: PartResult, first: int = 0, *, phase: str = "") -> None:
        for index in range(first, len(part.frames)):
            await part.wait_for_frames(index + 1)
            if phase and index == 0:
                await self.failpoints.reached(phase)
            await self.send(stream, part.frame(index))

    async def take_result(self, stream: Stream, part: PartResult, peer: str, first: int = 0) -> None:
        """Receive the part's result from `peer`. Errors blame only `peer`."""
        for index in range(first, len(part.frames)):
            part.put(index, await self._receive_result(stream, num_values(part.frames[index]), peer))

    def left_s(self, share: float) -> float:
        """Return how many seconds are left until `share` of the reduction's time has passed."""
        return self._began_at + share * self.group.reduce_s - asyncio.get_running_loop().time()

    def heard(self, peer: str) -> None:
        """Record that a frame of `peer` has arrived."""
        self.heard_at[peer] = asyncio.get_running_loop().time()
        self._is_silent[peer].clear()

    def queued_s(self, peer: str) -> float:
        """Return how many seconds the slices of a part that are in flight at once take between `peer` and this
        member."""
        part_bytes = self.scheme.codec.encoded_bytes(max(self.group.part_values))
        return self._connections.meter.transfer_s(peer, min(part_bytes, WINDOW_BYTES))

    async def until_silent(self, peer: str) -> None:
        """Return once `peer` has sent nothing for QUIET_S and has not answered a call in SILENT_S plus the time that
        the bytes queued before the answer can take."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(QUIET_S)
            asked_at = loop.time()
            if self.heard_at[peer] > asked_at - QUIET_S:
                continue
            queued_s = min(self.queued_s(peer), self.group.reduce_s / 4)
            if not await self._connections.answers(peer, SILENT_S + queued_s) and self.heard_at[peer] < asked_at:
                self._is_silent[peer].set()
                return

    async def expect(self, peer: str, inbox: FrameInbox, limit_s: float) -> bytes:
        """Return the next frame of `peer` from its `inbox`. Raises what `FrameInbox.take` does, PeerTimeout if `peer`
        is silent, and TimeoutError if it is there but no frame arrives within `limit_s`."""
        if inbox.has_frame:
            return await inbox.take()
        with suppress(TimeoutError):
            # most frames are about to arrive, and need no watch
            async with asyncio.timeout(SOON_S):
                return await inbox.take()
        async with asyncio.timeout(limit_s - SOON_S):
            return await self.while_there(peer, inbox.take())

    async def while_there(self, peer: str, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which needs `peer`. Raises PeerTimeout if `peer` falls silent before."""
        return await self._before_silence(peer, work, self.until_silent(peer))

    async def while_not_silent(self, peer: str, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which needs what `peer` has sent. Raises PeerTimeout as soon as another of this
        member's tasks has found that `peer` is silent."""
        return await self._before_silence(peer, work, self._is_silent[peer].wait())

    async def _before_silence(self, peer: str, work: Coroutine[Any, Any, T], silence: Coroutine[Any, Any, Any]) -> T:
        working, watching = asyncio.create_task(work), asyncio.create_task(silence)
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise silence_of(peer)
            return working.result()
        finally:
            working.cancel()
            watching.cancel()

    async def send(self, stream: Stream, data: Data) -> None:
        # streams accept any buffer, as long as it does not change any more
        await stream.send(cast("bytes", data))
        self.bytes_sent += len(data)

    async def off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await in_executor(self._executor, function, *arguments)

    async def _send_slice(self, stream: Stream, part: PartResult, index: int) -> None:
        # in a call of its own, so that no variable holds a slice that was sent
        data = await self.encoded(part.frames[index])
        with blamed(part.owner):
            await self.send(stream, data)

    async def _receive_result(self, stream: Stream, num_values: int, peer: str) -> bytes:
        try:
            data = await stream.receive()
            self.heard(peer)
            check_frame(self.scheme.codec, data, num_values)
        except EndOfStream:
            # no violation: an owner gives up a member that it cannot reach for a moment, and ends its streams at last
            raise PeerError("it ended its stream before its result was complete", peer_id=peer) from None
        except SwarmError as error:
            raise not_of_others(error, peer) from error
        except CodecError as error:
            raise PeerViolation(f"it sent a bad result: {error}", peer_id=peer) from error
        return data

    def _encode(self, frame: slice, buffer: bytearray | memoryview) -> None:
        if (delta_N := self._delta_N) is None:
            raise RoundError("the step is over")
        encode_slice_into(buffer, self.scheme.codec, self.scheme.feedback, delta_N, frame)


class FrameInbox:
    """Queues the frames of one incoming stream of `peer`, from the task that may use the stream to another task.

    A stream belongs to its handler, and is gone when the other side leaves. Frames that the other side sent before that
    must not be lost. `on_frame` is called with `peer` for each frame. None has more than `max_bytes`: a stream's
    messages may be far larger, and many frames can wait here.
    """

    def __init__(self, peer: str, on_frame: Callable[[str], None], max_bytes: int) -> None:
        self._peer = peer
        self._on_frame = on_frame
        self._max_bytes = max_bytes
        self._frames: asyncio.Queue[bytes | SwarmError] = asyncio.Queue()
        self._room = asyncio.Semaphore(INBOX_FRAMES)
        self._error: SwarmError | None = None
        self.num_received = 0
        self.is_filling = False

    async def fill(self, stream: Stream) -> None:
        """Receive frames until the other side has finished, failed, or left."""
        self.is_filling = True
        try:
            while True:
                await self._room.acquire()
                frame = await stream.receive()
                if len(frame) > self._max_bytes:
                    raise PeerViolation("it sent a slice that is larger than any", peer_id=self._peer)
                self._frames.put_nowait(frame)
                self.num_received += 1
                self._on_frame(self._peer)
        except EndOfStream:
            self._frames.put_nowait(PeerViolation("it sent too few values", peer_id=self._peer))
        except SwarmError as error:
            self._frames.put_nowait(error)
        except asyncio.CancelledError:
            self._frames.put_nowait(PeerUnreachable("it has left the reduction", peer_id=self._peer))
            raise
        finally:
            self.is_filling = False

    @property
    def has_frame(self) -> bool:
        """Return whether `take` would return or raise at once."""
        return self._error is not None or not self._frames.empty()

    def fail(self, error: SwarmError) -> None:
        """Record that no more frames arrive, because of `error`."""
        self._frames.put_nowait(error)

    async def take(self) -> bytes:
        """Return the next frame. Raises the error that ended the stream, once all frames before it are taken."""
        if self._error is None:
            item = await self._frames.get()
            self._room.release()
            if not isinstance(item, SwarmError):
                return item
            self._error = item
        raise self._error


def silence_of(peer: str) -> PeerTimeout:
    """Return the error to raise after `PartStreams.until_silent`."""
    return PeerTimeout("it sends nothing and answers nothing", peer_id=peer)


@contextmanager
def blamed(peer: str) -> Iterator[None]:
    """Make errors of `peer`'s stream name `peer`."""
    try:
        yield
    except PeerRefused as error:
        raise PeerError(f"it refuses its part: {error}", peer_id=peer) from error
    except SwarmError as error:
        raise not_of_others(error, peer) from error


def not_of_others(error: SwarmError, peer: str) -> SwarmError:
    """Return `error`, which came over `peer`'s stream, as an error of `peer`.

    If it blames another peer, that proves nothing about that peer. If it blames nobody, it is `peer`'s own error:
    `peer` could otherwise abort one attempt after the other without being found.
    """
    if isinstance(error, PeerError) and error.peer_id == peer:
        return error
    return PeerError(f"it gave up: {error.message}", peer_id=peer)
