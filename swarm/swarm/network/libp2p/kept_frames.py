"""Keeps the sent frames of one stream that the other side has not acknowledged, to be sent again over another
connection, and bounds them. Counts the received frames, for acknowledgements.

A budget bounds what all streams of a peer, and of the host, keep. A stream whose frames find no room keeps none from
then on, and ends with its connection.

A window bounds what one stream has under way, so that it does not fill the queue of a slow line. What a sender writes
beyond the line's rate waits in buffers: of the system, of the daemon, and of the home's router, which often holds
seconds of traffic. All else that the node sends then waits behind it: tokens of other sessions, pings, and echoes. So
the window shrinks when acknowledgements take MAX_QUEUE_S longer than the fastest one did, and grows while they come
sooner, as LEDBAT does (RFC 6817). It differs from LEDBAT in that one frame at a time is measured, one that closes the
window; that each measurement halves the window at most; and that the fastest acknowledgement counts for as long as the
connection lasts. Without sockets; only the window reads the loop's clock.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator

from swarm_protocol.errors import PeerRefused, PeerViolation

from swarm.network import framing
from swarm.network.peer_budgets import UnreadBudget

PEER_BYTES = 8 * framing.WINDOW_BYTES
"""Maximum unacknowledged bytes of all streams to one peer: eight full windows. A peer acknowledges every 32 KiB of
a stream at once, and the rest within about a second."""

HOST_BYTES = 256 * 2**20
"""Maximum unacknowledged bytes of all streams to all peers."""

MIN_WINDOW_BYTES = FIRST_WINDOW_BYTES = 3 * framing.ACK_BYTES // 2
"""Enough that the other side always acknowledges: its count of bytes is a little lower, as it has no headers."""

MAX_WINDOW_BYTES = framing.WINDOW_BYTES - framing.CHUNK_BYTES
"""The largest window that is ever closed: beyond it, credit holds the sender up."""

MAX_QUEUE_S = 0.25
"""Seconds for which bytes may wait in queues: less than a person notices, and more than a busy machine's pauses."""

Frame = tuple[bytes | memoryview, ...]
"""A header and perhaps a body, to be written one after the other. They must not change while the frame is kept."""


class SentFrames:
    """The sent frames of one stream that were not acknowledged, and the stream's window. It implements
    `peer_budgets.UnreadHolder`."""

    def __init__(self, peer_id: str, budget: UnreadBudget) -> None:
        self.peer_id = peer_id
        self.can_resend = True  # False once the budget had no room, so that frames cannot be sent again
        self.num_bytes = 0  # the cost of the frames that are kept
        self.num_sent = self.num_acknowledged = 0
        self._budget = budget
        self._frames: deque[tuple[Frame, int]] = deque()  # each with its cost
        self._window_bytes = float(FIRST_WINDOW_BYTES)
        self._fastest_s = math.inf
        self._measured: tuple[int, float] | None = None  # the number of a frame under way, and when it was sent

    @property
    def has_room(self) -> bool:
        """Return whether more data may be sent now. A frame may exceed the window, and frames that are not kept have no
        bound."""
        return self.num_bytes < self._window_bytes

    def add(self, frame: Frame) -> None:
        """Count a frame that is sent now, and keep it if frames can be sent again."""
        self.num_sent += 1
        if not self.can_resend:
            return
        cost = framing.cost(sum(map(len, frame)))
        self._frames.append((frame, cost))
        self.num_bytes += cost
        self._budget.charge(self, cost)
        if self._measured is None and not self.has_room:
            self._measured = self.num_sent, asyncio.get_running_loop().time()

    def acknowledge(self, num_frames: int) -> None:
        """Forget the `num_frames` oldest frames, and adapt the window. Raises PeerViolation if fewer are
        unacknowledged."""
        self.num_acknowledged += num_frames
        if self.num_acknowledged > self.num_sent:
            raise PeerViolation("the peer acknowledged more than it was sent", peer_id=self.peer_id)
        if self.can_resend:
            cost = sum(self._frames.popleft()[1] for _ in range(num_frames))
            self.num_bytes -= cost
            self._budget.release(self, cost)
        if self._measured is not None and self.num_acknowledged >= self._measured[0]:
            self._adapt(asyncio.get_running_loop().time() - self._measured[1])
            self._measured = None

    def _adapt(self, delay_s: float) -> None:
        self._fastest_s = min(self._fastest_s, delay_s)
        queue_s = delay_s - self._fastest_s
        if queue_s > MAX_QUEUE_S:
            self._window_bytes = max(self._window_bytes * max(0.5, MAX_QUEUE_S / queue_s), MIN_WINDOW_BYTES)
        elif queue_s < MAX_QUEUE_S / 2:
            self._window_bytes = min(2 * self._window_bytes, MAX_WINDOW_BYTES)

    def to_resend(self, num_received: int) -> Iterator[Frame]:
        """Return the frames to send again over another connection: all after the first `num_received` frames of the
        stream. The window is measured anew.

        Raises PeerViolation if `num_received` contradicts earlier acknowledgements, or is more than was sent.
        """
        if num_received < self.num_acknowledged:
            raise PeerViolation("the peer claims to have received less than it acknowledged", peer_id=self.peer_id)
        self._measured, self._fastest_s = None, math.inf
        self.acknowledge(num_received - self.num_acknowledged)
        return (frame for frame, _ in self._frames)

    def give_way(self, _refusal: PeerRefused) -> None:
        self._forget()

    def drop(self) -> None:
        """Forget all frames, since the stream has ended. Idempotent."""
        self._forget()
        self._budget.drop(self)

    def _forget(self) -> None:
        self.can_resend, self.num_bytes = False, 0
        self._frames.clear()


class ReceivedFrames:
    """Counts received frames. `unacknowledged_cost` is the cost of those that were not acknowledged yet."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.unacknowledged_cost = 0
        self._num_acknowledged = 0
        self._noted_progress = (0, 0)

    def count(self, num_bytes: int) -> int:
        """Count a received frame with a body of `num_bytes`, and return `unacknowledged_cost`."""
        self.num_frames += 1
        self.unacknowledged_cost += framing.cost(num_bytes)
        return self.unacknowledged_cost

    def has_progressed(self, num_partial: int) -> bool:
        """Return whether anything has come since the last call. `num_partial` bytes are there of a frame that is not
        whole."""
        before, self._noted_progress = self._noted_progress, (self.num_frames, num_partial)
        return self._noted_progress != before

    def acknowledgement(self) -> bytes:
        """Return a frame that acknowledges all received frames. The caller must write it now."""
        return framing.acknowledgement(self.note_acknowledged())

    def note_acknowledged(self) -> int:
        """Note that all received frames are acknowledged, and return how many were not acknowledged before."""
        num_frames = self.num_frames - self._num_acknowledged
        self._num_acknowledged = self.num_frames
        self.unacknowledged_cost = 0
        return num_frames
