"""A multiplexed connection: one stream between two peers of a model that carries the frames of all their sequences.

    async with open_stream(network, peer_id, model) as stream:   # or the stream that a handler is given
        connection = MultiplexedConnection(stream, peer_id)
        await connection.run(on_frame)                           # until either side ends it

`send` never waits: it queues a frame. The frames that have gathered when the stream takes more go as one message, so a
batch of 16 costs one message. `on_frame` gets received frames one by one and must not wait either. A peer that does not
read is cut off: at most MAX_QUEUED_BYTES are kept for it, and the time of a message is limited.

The frames of one sequence stay in order (`FrameQueue`). The small frames of all sequences go first, as a token or a
close may wait for nothing. Then the sequences that have many rows take turns, each with one frame, or on a slow line
with as many of its rows as the line carries in a moment: a prompt of one session must not keep all others waiting.

The owner decides which frames a peer may send, and what becomes of the sequences when the connection ends; `error` says
why it ended. The task that calls `run` owns the state; senders are in the same loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, SwarmError
from swarm_protocol.frames import Frames, num_bytes
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import SESSION_METHOD, Frame, Push, StepRequest, StepResult

from swarm.deadline_timer import DeadlineTimer
from swarm.network.interface import EndOfStream, Stream, StreamOpener

SMALL_BYTES = 2**14 + limits.FRAME_BYTES
"""A frame of at most this size overtakes larger ones of other sequences."""

MESSAGE_BYTES = 2**20
"""Maximum bytes of the small frames of one message."""

SequenceKey: TypeAlias = tuple[str, bytes]
"""A sequence's client and id. The client is "" in frames that do not name it, since it is an end of the connection."""

OPEN_S = 10.0
"""Covers dialling through a relay and a server's slow moment."""

FIRST_CUT_BYTES = 2**15
MIN_CUT_BYTES = 2**14
MAX_CUT_BYTES = 2**23
"""Bytes to which frames of rows are cut: at first, and bounds. The next server runs the rows of a frame at once, so
large ones are better where the line is fast."""

QUICK_S, SLOW_S = 0.05, 0.2
"""Two long messages in a row that are sent within QUICK_S double the bytes to which frames are cut, and one that takes
longer than SLOW_S halves them. A single quick one may only have found room that a slow one left."""

ROOM_BYTES = 8 * 2**20
"""Senders that can wait compute nothing more while this much is unsent."""

MAX_QUEUED_BYTES = 256 * 2**20
"""Bound for senders that cannot wait: four of the largest frames."""

MAX_QUEUED_FRAMES = 2**14
"""Bound for frames of any size: a peer that provokes short refusals and reads none must not fill the memory."""

STALL_S = 20.0
"""Time that a message may take beside that for its bytes. A peer reads at once, unless it hangs."""

SLOWEST_SERVER_BYTES_PER_S = 62_500.0
"""Half of an uplink of 1 Mbit/s, since rows that go to two peers at once share it unequally. Pings notice a dead peer
sooner."""


class MultiplexedConnection:
    """`error` is set once the connection has ended; nothing is sent or received after that."""

    def __init__(self, stream: Stream, peer_id: str) -> None:
        self.peer_id = peer_id
        self.error: SwarmError | None = None
        self.num_messages = 0
        self._stream = stream
        self._queue = FrameQueue()
        self._cut_bytes = FIRST_CUT_BYTES
        self._was_quick = False
        self._is_ending = False
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._halves: list[asyncio.Task[None]] = []
        self._sent_by_s = math.inf  # when the message that is being sent must be out
        self._stall = DeadlineTimer(self._check_stall)

    @property
    def is_over(self) -> bool:
        """True once it has ended, or will end when the queue is sent."""
        return self._is_ending or self.error is not None

    def send(self, frame: Frame) -> None:
        """Queue a frame. Raises what ended the connection; a peer that does not read ends it with PeerTimeout."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        self._queue.put(frame)
        if self._queue.num_bytes > ROOM_BYTES:
            self._has_room.clear()
        if self._queue.num_bytes > MAX_QUEUED_BYTES or self._queue.num_frames > MAX_QUEUED_FRAMES:
            self._fail_unread()
        self._changed.set()

    def is_sending(self, key: SequenceKey) -> bool:
        """Return whether a frame of the sequence waits to be sent."""
        return key in self._queue

    def forget_rows(self, key: SequenceKey) -> None:
        """Send no more rows of a sequence that has ended, or gets them from elsewhere."""
        self._queue.forget_rows(key)
        self._note_room()

    async def room(self) -> None:
        """Wait while much is unsent. Raises what ended the connection."""
        await self._has_room.wait()
        if self.error is not None:
            raise self.error.with_traceback(None)

    def end(self) -> None:
        """End the connection once the queue is sent."""
        self._is_ending = True
        self._changed.set()

    def fail(self, error: SwarmError) -> None:
        """End the connection now."""
        if self.error is not None:
            return
        self.error = error
        self._queue.clear()
        self._has_room.set()
        for half in self._halves:
            half.cancel()

    async def run(
        self, on_frame: Callable[[Frame], None], may_read: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Send and receive until the connection has ended; `error` says why. A SwarmError of `on_frame` ends it too.

        Nothing more is read until `may_read` returns, so that a peer that sends too much has to stop.
        """
        try:
            if self.error is None:
                async with asyncio.TaskGroup() as tasks:
                    self._halves = [
                        tasks.create_task(self._write(), name=f"write to {self.peer_id}"),
                        tasks.create_task(self._read(on_frame, may_read), name=f"read from {self.peer_id}"),
                    ]
        finally:
            self._halves = []
            self._stall.cancel()
            self.fail(PeerUnreachable("the connection is closed", peer_id=self.peer_id))

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue.num_frames or not self._is_ending:
                if not self._queue.num_frames:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                message = Frames(tuple(self._queue.take(self._cut_bytes))).to_bytes()
                self._note_room()
                began_s = loop.time()
                self._sent_by_s = began_s + STALL_S + len(message) / SLOWEST_SERVER_BYTES_PER_S
                self._stall.set(self._sent_by_s)
                await self._stream.send(message)
                self._sent_by_s = math.inf
                self._adapt(len(message), loop.time() - began_s)
                self.num_messages += 1
            self.fail(PeerUnreachable("the connection is closed", peer_id=self.peer_id))
        except SwarmError as error:
            self.fail(_named(error, self.peer_id))

    def _check_stall(self) -> None:
        if self._sent_by_s <= asyncio.get_running_loop().time():
            self._fail_unread()
        else:
            self._stall.set(self._sent_by_s)

    def _fail_unread(self) -> None:
        self.fail(PeerTimeout("the peer does not read what it is sent", peer_id=self.peer_id))

    def _note_room(self) -> None:
        if self._queue.num_bytes <= ROOM_BYTES:
            self._has_room.set()

    def _adapt(self, num_bytes: int, took_s: float) -> None:
        """Cut the next frames so that their messages take neither long nor little."""
        is_quick = took_s < QUICK_S
        if took_s > SLOW_S:
            self._cut_bytes = max(self._cut_bytes // 2, MIN_CUT_BYTES)
        elif is_quick and self._was_quick and num_bytes >= self._cut_bytes:
            self._cut_bytes = min(2 * self._cut_bytes, MAX_CUT_BYTES)
            is_quick = False
        self._was_quick = is_quick

    async def _read(self, on_frame: Callable[[Frame], None], may_read: Callable[[], Awaitable[None]] | None) -> None:
        try:
            while True:
                for frame in Frames.from_bytes(await self._stream.receive()).frames:
                    on_frame(frame)
                if may_read is not None:
                    await may_read()
        except EndOfStream:
            self.fail(PeerUnreachable("the peer has closed the connection", peer_id=self.peer_id))
        except SwarmError as error:
            self.fail(_named(error, self.peer_id))


@asynccontextmanager
async def open_stream(network: StreamOpener, peer_id: str, model: str) -> AsyncIterator[Stream]:
    """Open the stream of a connection to a server of `model`. Raises PeerError, or what the server refuses with.

    The stream has no time limit of its own: a peer that only takes pushes sends nothing, however long it works.
    """
    async with AsyncExitStack() as stack:
        opening = network.stream(peer_id, f"{SESSION_METHOD}/{model}", timeout_s=None)
        try:
            async with asyncio.timeout(OPEN_S):
                stream = await stack.enter_async_context(opening)
        except TimeoutError:
            raise PeerTimeout("the peer did not open a connection in time", peer_id=peer_id) from None
        yield stream


def _named(error: SwarmError, peer_id: str) -> SwarmError:
    error.peer_id = error.peer_id or peer_id
    return error


class FrameQueue:
    """The waiting frames of all sequences. `num_bytes` and `num_frames` count them."""

    def __init__(self) -> None:
        self.num_bytes = self.num_frames = 0
        self._waiting: OrderedDict[SequenceKey, deque[tuple[Frame, int]]] = OrderedDict()  # with their sizes

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._waiting

    def put(self, frame: Frame) -> None:
        size = num_bytes(frame)
        key = getattr(frame, "client_peer_id", ""), getattr(frame, "sequence_id", b"")
        self._waiting.setdefault(key, deque()).append((frame, size))
        self._count(1, size)

    def clear(self) -> None:
        self._waiting.clear()
        self.num_bytes = self.num_frames = 0

    def forget_rows(self, key: SequenceKey) -> None:
        """Drop the many rows of a sequence that waits for none any more; its small frames still go."""
        for frame, size in self._waiting.pop(key, ()):
            self._count(-1, -size)
            if size <= SMALL_BYTES:
                self.put(frame)

    def take(self, max_bytes: float) -> list[Frame]:
        """Take the frames of one message: at least one, if there are any. A frame of rows is cut to `max_bytes`."""
        taken = self._take_small()
        if self._waiting and len(taken) < limits.MAX_FRAMES:
            key, frames = next(iter(self._waiting.items()))
            frame, size = frames.popleft()
            self._count(-1, -size)
            first, rest = cut(frame, max_bytes)
            if rest is not None:
                rest_size = num_bytes(rest)
                frames.appendleft((rest, rest_size))
                self._count(1, rest_size)
            self._waiting.move_to_end(key)
            self._drop_if_empty(key)
            taken.append(first)
        return taken

    def _take_small(self) -> list[Frame]:
        taken, total = list[Frame](), 0
        for key, frames in list(self._waiting.items()):
            while frames and (size := frames[0][1]) <= SMALL_BYTES:
                if total + size > MESSAGE_BYTES or len(taken) == limits.MAX_FRAMES:
                    return taken
                taken.append(frames.popleft()[0])
                total += size
                self._count(-1, -size)
            self._drop_if_empty(key)
        return taken

    def _drop_if_empty(self, key: SequenceKey) -> None:
        if not self._waiting[key]:
            del self._waiting[key]

    def _count(self, num_frames: int, num_bytes: int) -> None:
        self.num_frames += num_frames
        self.num_bytes += num_bytes


def cut(frame: Frame, max_bytes: float) -> tuple[Frame, Frame | None]:
    """Return a frame of about `max_bytes` with the first rows of a frame, and one with the others; None if it has no
    others, or must stay whole: drafts belong to their token, and an answer to its draw."""
    if not isinstance(frame, StepRequest | Push | StepResult) or (rows := frame.rows) is None:
        return frame, None
    num_rows = max(2, int(max_bytes) // rows.row_bytes)  # a single row is a token
    if num_rows >= rows.num_rows or (not isinstance(frame, StepRequest) and frame.num_drafts):
        return frame, None
    if isinstance(frame, StepResult):
        return _cut_result(frame, rows, num_rows)
    if frame.want not in ("nothing", "token"):
        return frame, None
    first = replace(frame, rows=rows.first(num_rows), want="nothing", draw=None)
    return first, replace(frame, rows=rows.without(num_rows), position=frame.position + num_rows)


def _cut_result(result: StepResult, rows: Rows, num_rows: int) -> tuple[Frame, Frame | None]:
    if result.passed_on or result.token is not None:
        return result, None
    rest = rows.without(num_rows)
    first = replace(result, rows=rows.first(num_rows), position=result.position - rest.num_rows, compute_ms=0.0)
    return replace(first, queue_ms=0.0, upstream_ms=()), replace(result, rows=rest)
