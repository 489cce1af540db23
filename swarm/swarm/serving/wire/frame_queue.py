"""Queues the frames that wait for one connection, and takes them for its messages in a fair order.

The frames of one sequence stay in order. The small frames of all sequences go first, as a token or a close may wait for
nothing. Then the sequences that have many rows take turns, each with one frame, or with as many of its rows as the
caller allows: on a slow line a prompt of one session must not keep all others waiting. Pure, without a connection.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import replace
from typing import TypeAlias

from swarm_protocol import limits
from swarm_protocol.frames import num_bytes
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import Frame, Push, StepRequest, StepResult

SMALL_BYTES = 2**14 + limits.FRAME_BYTES
"""A frame of at most this size overtakes larger ones of other sequences."""

MESSAGE_BYTES = 2**20
"""Maximum bytes of the small frames of one message."""

SequenceKey: TypeAlias = tuple[str, bytes]
"""A sequence's client and id. The client is "" in frames that do not name it, since it is an end of the connection."""


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
