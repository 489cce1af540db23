"""The frames of one stream that the other side has not acknowledged, kept to be sent again over another connection, and
the count of those that have come, by which this side acknowledges them.

What all streams of a peer and of the host keep is charged to a `UnreadBudget` of its own: a stream for which there is
no room keeps nothing from then on, and ends with its connection. Pure: knows frames, not sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from swarm_protocol.errors import PeerRefused, PeerViolation

from swarm.network import framing
from swarm.network.peer_budgets import UnreadBudget

PEER_BYTES = 8 * framing.WINDOW_BYTES
"""Unacknowledged bytes of all streams to one peer: eight full windows. A peer acknowledges each 2 MiB at least, and
what is left within a second or so."""

HOST_BYTES = 256 * 2**20
"""Unacknowledged bytes to all peers."""

Frame = tuple[bytes | memoryview, ...]
"""A header and perhaps a body, which are written one after the other. Nothing of it may change while it is kept."""


class SentFrames:
    """Implements `peer_budgets.UnreadHolder`."""

    def __init__(self, peer_id: str, budget: UnreadBudget) -> None:
        self.peer_id = peer_id
        self.can_resend = True  # False: the budget had no room, and nothing can be sent again
        self._budget = budget
        self._frames: deque[tuple[Frame, int]] = deque()  # each with its cost
        self._num_sent = 0
        self._num_acknowledged = 0

    def add(self, frame: Frame) -> None:
        """Count a frame that is sent, and keep it while frames can be sent again."""
        self._num_sent += 1
        if not self.can_resend:
            return
        cost = framing.cost(sum(map(len, frame)))
        self._frames.append((frame, cost))
        self._budget.charge(self, cost)

    def acknowledge(self, num_frames: int) -> None:
        """Forget the `num_frames` oldest frames. Raises PeerViolation if not as many are out."""
        self._num_acknowledged += num_frames
        if self._num_acknowledged > self._num_sent:
            raise PeerViolation("the peer acknowledged more than it was sent", peer_id=self.peer_id)
        if self.can_resend:
            self._budget.release(self, sum(self._frames.popleft()[1] for _ in range(num_frames)))

    def to_resend(self, num_received: int) -> Iterator[Frame]:
        """Return the frames to send again: those after the first `num_received` of the stream.

        Raises PeerViolation for a number that cannot be.
        """
        if num_received < self._num_acknowledged:
            raise PeerViolation("the peer takes back what it acknowledged", peer_id=self.peer_id)
        self.acknowledge(num_received - self._num_acknowledged)
        return (frame for frame, _ in self._frames)

    def give_way(self, _refusal: PeerRefused) -> None:
        self.can_resend = False
        self._frames.clear()

    def drop(self) -> None:
        """Keep nothing any more: the stream has ended. Idempotent."""
        self.can_resend = False
        self._frames.clear()
        self._budget.drop(self)


class ReceivedFrames:
    """Counts the frames that have come. `unacknowledged_cost` is of those that the other side was not told of."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.unacknowledged_cost = 0
        self._num_acknowledged = 0
        self._noted_progress = (0, 0)

    def count(self, num_bytes: int) -> int:
        """Count a frame with a body of `num_bytes`, and return `unacknowledged_cost`."""
        self.num_frames += 1
        self.unacknowledged_cost += framing.cost(num_bytes)
        return self.unacknowledged_cost

    def has_progressed(self, num_partial: int) -> bool:
        """Return whether anything has come since the last call. `num_partial` bytes are there of a frame that is not
        whole."""
        before, self._noted_progress = self._noted_progress, (self.num_frames, num_partial)
        return self._noted_progress != before

    def acknowledgement(self) -> bytes:
        """Return the frame that acknowledges all that has come, which is to be written now."""
        return framing.acknowledgement(self.note_acknowledged())

    def note_acknowledged(self) -> int:
        """Note that the other side knows what has come, and return how many of these frames it did not know of."""
        num_frames = self.num_frames - self._num_acknowledged
        self._num_acknowledged = self.num_frames
        self.unacknowledged_cost = 0
        return num_frames
