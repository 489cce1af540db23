"""Keeps the sent frames of one stream that the other side has not acknowledged, to be sent again over another
connection, and counts the received frames, for acknowledgements.

A budget bounds what all streams of a peer, and of the host, keep. A stream whose frames find no room keeps none from
then on, and ends with its connection. Pure, without sockets.
"""

from __future__ import annotations

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

Frame = tuple[bytes | memoryview, ...]
"""A header and perhaps a body, to be written one after the other. They must not change while the frame is kept."""


class SentFrames:
    """The sent frames of one stream that were not acknowledged. It implements `peer_budgets.UnreadHolder`."""

    def __init__(self, peer_id: str, budget: UnreadBudget) -> None:
        self.peer_id = peer_id
        self.can_resend = True  # False once the budget had no room, so that frames cannot be sent again
        self.num_bytes = 0  # the cost of the frames that are kept
        self.num_sent = self.num_acknowledged = 0
        self._budget = budget
        self._frames: deque[tuple[Frame, int]] = deque()  # each with its cost

    def add(self, frame: Frame) -> None:
        """Count a sent frame, and keep it if frames can be sent again."""
        self.num_sent += 1
        if not self.can_resend:
            return
        cost = framing.cost(sum(map(len, frame)))
        self._frames.append((frame, cost))
        self.num_bytes += cost
        self._budget.charge(self, cost)

    def acknowledge(self, num_frames: int) -> None:
        """Forget the `num_frames` oldest frames. Raises PeerViolation if fewer are unacknowledged."""
        self.num_acknowledged += num_frames
        if self.num_acknowledged > self.num_sent:
            raise PeerViolation("the peer acknowledged more than it was sent", peer_id=self.peer_id)
        if self.can_resend:
            cost = sum(self._frames.popleft()[1] for _ in range(num_frames))
            self.num_bytes -= cost
            self._budget.release(self, cost)

    def to_resend(self, num_received: int) -> Iterator[Frame]:
        """Return the frames to send again: all after the first `num_received` frames of the stream.

        Raises PeerViolation if `num_received` contradicts earlier acknowledgements, or is more than was sent.
        """
        if num_received < self.num_acknowledged:
            raise PeerViolation("the peer claims to have received less than it acknowledged", peer_id=self.peer_id)
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
