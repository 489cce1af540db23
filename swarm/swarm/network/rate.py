"""Limits on bytes per second: a token bucket that may go into debt, and the turns in which streams send under one.

Simulated links and the limits that a node's owner sets both use `Rate`, to which the time is an argument. Who may wait
asks `wait_s` first; who must not wait only reserves, and those that may wait then wait longer. `Allowance` is what an
owner allows a node to send, or to receive: payload bytes are charged with what the wire adds to them.

A frame that must wait is queued with its stream's `PacedWriter`. `Turns` lets the writers that have something write a
slice each, one after the other, as fast as the limit allows: a stream with little to send is not kept waiting by one
with much. Frames of one stream stay in order. A frame without a body of its own, such as a credit, goes out at once
unless it would overtake its stream's frames. Without a limit everything is written at once, and nothing is here.
`write` is how everything is written to connections that may have been lost a moment ago.

State belongs to the network's loop, in whose callbacks everything runs: there is no task.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Sequence

SLICE_BYTES = 2**14
"""Bytes that a stream sends before the next has its turn: 7 ms of 20 Mbit/s."""


class Rate:
    """A bottleneck that serves bytes one after the other, such as a home's uplink that all its links share.

    `burst_s` is how much unused time it makes up for. Virtual timers are exact and need none; real ones come late.
    `max_debt_s` bounds how far ahead it can be reserved: bytes beyond that pass uncounted, so that those that never
    wait cannot stop those that do.
    """

    def __init__(self, bytes_per_s: float, *, burst_s: float = 0.0, max_debt_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._max_debt_s = max_debt_s
        self._free_at_s = 0.0

    def reserve(self, num_bytes: float, now_s: float) -> float:
        """Reserve the link for `num_bytes` and return the time at which the last of them will have passed."""
        # comparisons, not `min` and `max`: a simulated link asks three times for each message
        free_at_s, earliest_s, latest_s = self._free_at_s, now_s - self._burst_s, now_s + self._max_debt_s
        free_at_s = (free_at_s if free_at_s > earliest_s else earliest_s) + num_bytes / self.bytes_per_s
        self._free_at_s = free_at_s = free_at_s if free_at_s < latest_s else latest_s
        return free_at_s

    def wait_s(self, now_s: float) -> float:
        """Return how long the bytes that are reserved still take; 0 if more may pass now."""
        return max(0.0, self._free_at_s - now_s)


OVERHEAD = 1.04
"""Bytes on the wire for each byte of payload: headers of TCP and IP in Ethernet's packets, of the cipher and of the
multiplexer."""

BURST_S = 0.05
"""Unused time that a limit makes up for: several times what a timer of a busy loop is late."""

MAX_DEBT_S = 2.0
"""Time for which calls, which never wait, can keep streams waiting."""


class Allowance:
    """Bytes may pass at `bytes_per_s`; infinite: without a limit."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.is_limited = bytes_per_s < math.inf
        self._rate = Rate(bytes_per_s, burst_s=BURST_S, max_debt_s=MAX_DEBT_S)

    def charge(self, num_bytes: int) -> None:
        """Charge a payload that passes now."""
        if self.is_limited:
            self._rate.reserve(num_bytes * OVERHEAD, asyncio.get_running_loop().time())

    def wait_s(self) -> float:
        """Return how long what need not pass now has to wait; 0: not at all."""
        return self._rate.wait_s(asyncio.get_running_loop().time()) if self.is_limited else 0.0


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


def write(writer: asyncio.StreamWriter, *parts: bytes | memoryview) -> None:
    """Write `parts`, or drop them if the connection is lost: whoever reads or drains next hears of it.

    asyncio's own event loops do the same, but uvloop raises RuntimeError for a write to a connection that is closed.
    """
    if not writer.transport.is_closing():
        writer.writelines(parts)


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
            write(self._writer, *frame)
        elif at_once and self.is_empty:
            write(self._writer, *frame)
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
            write(self._writer, part[:left_bytes])
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
