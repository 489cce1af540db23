"""The turns in which streams send where a node's upload is limited.

A frame that must wait is queued with its stream's `PacedWriter`. `Turns` lets the writers that have something write a
slice each, one after the other, as fast as the limit allows: a stream with little to send is not kept waiting by one
with much. Frames of one stream stay in order. A frame without a body of its own, such as a credit, goes out at once
unless it would overtake its stream's frames. Without a limit everything is written at once, and nothing is here.

Everything runs in the loop's callbacks: there is no task.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence

from swarm.network.rate import Allowance

SLICE_BYTES = 2**14
"""Bytes that a stream sends before the next has its turn: 7 ms of 20 Mbit/s."""


class Turns:
    """The turns at the upload of one node."""

    def __init__(self, upload: Allowance) -> None:
        self.is_limited = upload.is_limited
        self._upload = upload
        self._waiting: OrderedDict[PacedWriter, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def charge(self, num_bytes: int) -> None:
        """Charge what is written without a turn."""
        self._upload.charge(num_bytes)

    def enter(self, writer: PacedWriter) -> None:
        """Note that `writer` has something to send. One that has dropped what it had keeps its place, and has no second
        one."""
        self._waiting[writer] = None
        if self._timer is None:
            self._take_turns()

    def _take_turns(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting:
            wait_s = self._upload.wait_s()
            if wait_s > 0:
                self._timer = loop.call_later(wait_s, self._take_turns)
                return
            writer, _ = self._waiting.popitem(last=False)
            self.charge(writer.write_slice())
            if not writer.is_empty:
                self._waiting[writer] = None


class PacedWriter:
    """Writes the frames of one stream to one connection, in turns with those of other streams."""

    def __init__(self, writer: asyncio.StreamWriter, turns: Turns) -> None:
        self._writer = writer
        self._turns = turns
        self._is_limited = turns.is_limited
        self._queue: deque[memoryview] = deque()
        self._emptied = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def write(self, frame: Sequence[bytes | memoryview], *, at_once: bool) -> None:
        """Write `frame` now if there is no limit, or if it goes out `at_once`, and overtakes nothing; else queue it."""
        if not self._is_limited:
            self._writer.writelines(frame)
        elif at_once and self.is_empty:
            self._writer.writelines(frame)
            self._turns.charge(sum(map(len, frame)))
        else:
            was_empty = self.is_empty
            self._queue.extend(memoryview(part) for part in frame if part)
            if was_empty:
                self._emptied.clear()
                self._turns.enter(self)

    def write_slice(self) -> int:
        """Write up to SLICE_BYTES of what is queued, and return how many they were."""
        if self._writer.transport.is_closing():
            self.drop()
            return 0
        left_bytes = SLICE_BYTES
        while self._queue and left_bytes:
            part = self._queue.popleft()
            if len(part) > left_bytes:
                self._queue.appendleft(part[left_bytes:])
            self._writer.write(part[:left_bytes])
            left_bytes -= min(left_bytes, len(part))
        if not self._queue:
            self._emptied.set()
        return SLICE_BYTES - left_bytes

    async def emptied(self) -> None:
        """Wait until nothing is queued."""
        while self._queue:
            await self._emptied.wait()

    def flush(self) -> None:
        """Write everything that is queued, without waiting for turns: the stream ends."""
        while self._queue:
            self._turns.charge(self.write_slice())

    def drop(self) -> None:
        """Forget what is queued. Idempotent."""
        self._queue.clear()
        self._emptied.set()
