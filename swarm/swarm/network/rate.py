"""Limits on bytes per second: a token bucket that may go into debt, and the turns in which streams share it.

Simulated links and the owner's limits both use `Rate`, which gets the time as an argument. Traffic that may wait asks
`wait_s` first. Traffic that must not wait only reserves, and makes the other traffic wait longer. `Allowance` is the
owner's limit on what the node sends, or receives; payload bytes are charged with the overhead of the wire.

A frame that must wait is queued in its stream's `PacedWriter`. `Turns` lets each writer with queued frames write a
slice in turn, as fast as the limit allows, so a stream with much to send does not keep the others waiting. Frames of
one stream stay in order. A frame that carries no data, such as a credit, is sent at once unless it would overtake its
stream's frames. Without a limit, everything is written at once, and nothing is queued here. Every write to a connection
goes through `write`, since the connection may have been lost a moment ago.

State belongs to the network's loop. Everything runs in its callbacks; there is no task.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence

SLICE_BYTES = 2**14
"""Bytes that a stream sends in one turn: 7 ms at 20 Mbit/s."""


class Rate:
    """A bottleneck that serves bytes one after the other, such as a home's uplink that all its links share. Whoever
    reserves may count something else than bytes.

    Unused time of up to `burst_s` may be made up for: real timers fire late, whereas virtual ones are exact and need
    none. `max_debt_s` bounds how far ahead the rate can be reserved. Bytes beyond that pass uncounted, so that traffic
    that never waits cannot stop traffic that waits.
    """

    def __init__(self, bytes_per_s: float, *, burst_s: float = 0.0, max_debt_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._max_debt_s = max_debt_s
        self._free_at_s = -math.inf

    def reserve(self, num_bytes: float, now_s: float) -> float:
        """Reserve the bottleneck for `num_bytes` and return the time at which the last of them will have passed."""
        # comparisons, not `min` and `max`: a simulated link asks three times for each message
        free_at_s, earliest_s, latest_s = self._free_at_s, now_s - self._burst_s, now_s + self._max_debt_s
        free_at_s = (free_at_s if free_at_s > earliest_s else earliest_s) + num_bytes / self.bytes_per_s
        self._free_at_s = free_at_s = free_at_s if free_at_s < latest_s else latest_s
        return free_at_s

    def wait_s(self, now_s: float) -> float:
        """Return how many seconds the reserved bytes still take; 0 if more may pass now."""
        return max(0.0, self._free_at_s - now_s)


OVERHEAD = 1.04
"""Bytes on the wire for each byte of payload, with the headers of Ethernet, IP, TCP, the cipher and the multiplexer."""

BURST_S = 0.05
"""Unused time that a limit makes up for: several times the delay of a timer in a busy loop."""

MAX_DEBT_S = 2.0
"""Time for which calls, which never wait, can keep streams waiting."""


class Allowance:
    """A limit of `bytes_per_s` on payload with its overhead; infinite means no limit."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.is_limited = bytes_per_s < math.inf
        self._rate = Rate(bytes_per_s, burst_s=BURST_S, max_debt_s=MAX_DEBT_S)

    def charge(self, num_bytes: int) -> None:
        """Charge a payload that passes now."""
        if self.is_limited:
            self._rate.reserve(num_bytes * OVERHEAD, asyncio.get_running_loop().time())

    def wait_s(self) -> float:
        """Return how many seconds traffic that may wait has to wait now."""
        return self._rate.wait_s(asyncio.get_running_loop().time()) if self.is_limited else 0.0


class Turns:
    """The turns at the upload of one node."""

    def __init__(self, upload: Allowance) -> None:
        self.is_limited = upload.is_limited
        self._upload = upload
        self._waiting: OrderedDict[PacedWriter, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def charge(self, num_bytes: int) -> None:
        """Charge bytes that are written without a turn."""
        self._upload.charge(num_bytes)

    def enter(self, writer: PacedWriter) -> None:
        """Queue `writer` for a turn, once. A writer that has dropped its frames meanwhile keeps its place."""
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


WRITELINES_NEVER_PAUSES = (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)
"""True in a Python whose asyncio forgets, in `writelines`, to have `drain` wait for a full buffer (CVE-2024-12254): a
peer that reads nothing would fill this process's memory."""


def write(writer: asyncio.StreamWriter, *parts: bytes | memoryview) -> None:
    """Write `parts`, or drop them if the connection is lost: the next read or drain reports the loss.

    asyncio's own event loops do the same, but uvloop raises RuntimeError for a write to a closed connection.
    """
    if writer.transport.is_closing():
        return
    if WRITELINES_NEVER_PAUSES:
        writer.write(b"".join(parts))
    else:
        writer.writelines(parts)


class PacedWriter:
    """Writes the frames of one stream to one connection, in turn with the frames of other streams."""

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
        """Write `frame` now if there is no limit, or if `at_once` and it overtakes no queued frame; else queue it."""
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
        """Write up to SLICE_BYTES of the queued bytes, and return their number."""
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
        """Write everything that is queued, without waiting for turns, since the stream ends."""
        while self._queue:
            self._turns.charge(self.write_slice())

    def drop(self) -> None:
        """Forget what is queued. Idempotent."""
        self._queue.clear()
        self._emptied.set()
