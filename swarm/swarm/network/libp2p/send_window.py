"""Bounds the bytes that one stream has under way, so that they do not fill the queue of a slow line.

What a sender writes beyond the line's rate waits in buffers: of the system, of the daemon, and of the home's router,
which often holds seconds of traffic. All else that the node sends then waits behind it: tokens of other sessions,
pings, and echoes. So the window shrinks when acknowledgements take MAX_QUEUE_S longer than the fastest one did, and
grows while they come sooner, as LEDBAT does (RFC 6817). It differs from LEDBAT in that one frame at a time is measured,
one that closes the window; that each measurement halves the window at most; and that the fastest acknowledgement counts
for as long as the connection lasts.

It belongs to the stream whose frames it counts. A stream whose frames are not kept has no bound.
"""

from __future__ import annotations

import asyncio
import math

from swarm.network import framing
from swarm.network.libp2p.kept_frames import SentFrames

MIN_BYTES = FIRST_BYTES = 3 * framing.ACK_BYTES // 2
"""Enough that the other side always acknowledges: its count of bytes is a little lower, as it has no headers."""

MAX_BYTES = framing.WINDOW_BYTES - framing.CHUNK_BYTES
"""The largest window that is ever closed: beyond it, credit holds the sender up."""

MAX_QUEUE_S = 0.25
"""Seconds for which bytes may wait in queues: less than a person notices, and more than a busy machine's pauses."""


class SendWindow:
    """The window of one stream, whose frames are in `sent`; without these, it is always open."""

    def __init__(self, sent: SentFrames | None) -> None:
        self._sent = sent
        self._limit_bytes = float(FIRST_BYTES)
        self._fastest_s = math.inf
        self._measured: tuple[int, float] | None = None  # the number of a frame under way, and when it was sent

    @property
    def is_open(self) -> bool:
        """Return whether more data may be sent now. A frame may exceed the window."""
        return self._sent is None or self._sent.num_bytes < self._limit_bytes

    def add(self, frame: tuple[bytes | memoryview, ...]) -> None:
        """Count and keep a frame that is sent now."""
        if self._sent is None:
            return
        self._sent.add(frame)
        if self._measured is None and not self.is_open:
            self._measured = self._sent.num_sent, asyncio.get_running_loop().time()

    def acknowledge(self, num_frames: int) -> None:
        """Forget the oldest frames, and adapt the window. Raises PeerViolation."""
        if self._sent is None:
            return
        self._sent.acknowledge(num_frames)
        if self._measured is not None and self._sent.num_acknowledged >= self._measured[0]:
            self._adapt(asyncio.get_running_loop().time() - self._measured[1])
            self._measured = None

    def restart(self) -> None:
        """Measure anew, over another connection."""
        self._measured, self._fastest_s = None, math.inf

    def _adapt(self, delay_s: float) -> None:
        self._fastest_s = min(self._fastest_s, delay_s)
        queue_s = delay_s - self._fastest_s
        if queue_s > MAX_QUEUE_S:
            self._limit_bytes = max(self._limit_bytes * max(0.5, MAX_QUEUE_S / queue_s), MIN_BYTES)
        elif queue_s < MAX_QUEUE_S / 2:
            self._limit_bytes = min(2 * self._limit_bytes, MAX_BYTES)
