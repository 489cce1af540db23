"""The frames and messages that one stream keeps: sent ones that the other side has not acknowledged, to be sent again
over another connection, the count of those that have come, which this side acknowledges, and what waits to be received.

What all streams of a peer and of the host keep is charged to two budgets. A stream that has no room for what it sent
keeps nothing from then on, and ends with its connection. A piece of a message is charged to the window and to the
host's budget when it is announced, before anything is allocated for it. Taking a piece opens the window again; the
budget is charged until the whole message is taken. Pure: knows frames, pieces and bounds, not sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from swarm_protocol.errors import PeerRefused, PeerViolation

from swarm.network import framing
from swarm.network.framing import Kind
from swarm.network.interface import too_long
from swarm.network.peer_budgets import UnreadBudget, UnreadHolder

PEER_BYTES = 8 * framing.WINDOW_BYTES
"""Unacknowledged bytes of all streams to one peer: eight full windows. A peer acknowledges each 2 MiB at least, and
what is left within a second or so."""

HOST_BYTES = 256 * 2**20
"""Unacknowledged bytes to all peers."""

_GRANT_BYTES = framing.WINDOW_BYTES // 4
"""Credit goes back in steps of this size: often enough that the sender never waits in a steady flow."""

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


class UnreadMessages:
    """The unread messages of one stream, none longer than `max_message_bytes`."""

    def __init__(self, stream: UnreadHolder, budget: UnreadBudget, max_message_bytes: int) -> None:
        self.is_finished = False  # the other side sends no more
        self._stream = stream
        self._budget = budget
        self._max_message_bytes = max_message_bytes
        self._is_dropped = False
        self._pieces: deque[tuple[Kind, bytes]] = deque()
        self._partial: list[bytes] = []  # taken pieces of a message whose last one is not here
        self._num_partial_bytes = 0
        self._partial_cost = 0
        self._coming_cost = 0  # of the announced piece
        self._window_cost = 0  # announced, and not granted again
        self._taken_cost = 0  # to be granted in the next step

    def announce(self, num_bytes: int) -> bool:
        """Charge a piece that begins to come, and return whether it is to be kept. Raises PeerViolation."""
        cost = framing.cost(num_bytes)
        if self._window_cost + cost > framing.WINDOW_BYTES:
            raise PeerViolation("the peer sent more than it was allowed to")
        if self.is_finished:
            raise PeerViolation("the peer sent data after it had finished")
        self._window_cost += cost
        self._coming_cost = cost
        return not self._is_dropped and self._budget.charge(self._stream, cost)

    def cut_off(self) -> None:
        """Forget the announced piece, of which the rest will not come: it is announced again."""
        self._window_cost -= self._coming_cost
        self._budget.release(self._stream, self._coming_cost)
        self._coming_cost = 0

    def add(self, kind: Kind, piece: bytes) -> None:
        """Keep the announced piece, which has come: `kind` is MORE, or DATA for the last one of its message."""
        self._coming_cost = 0
        if not self._is_dropped:  # else a short one, of which some was here already
            self._pieces.append((kind, piece))

    def take(self) -> bytes | None:
        """Take the next message; None: it is not all here yet. Raises PeerViolation for one that is too long, and keeps
        nothing from then on."""
        while self._pieces:
            kind, piece = self._pieces.popleft()
            cost = framing.cost(len(piece))
            self._taken_cost += cost
            self._partial_cost += cost
            self._num_partial_bytes += len(piece)
            if self._num_partial_bytes > self._max_message_bytes:
                self.drop()
                raise too_long(self._max_message_bytes, self._stream.peer_id)
            if kind == Kind.DATA:
                return self._joined(piece)
            self._partial.append(piece)
        return None

    def credit(self) -> int:
        """Return how many bytes the other side is granted now, which count as granted; 0: not yet worth a frame."""
        if self._taken_cost < _GRANT_BYTES:
            return 0
        granted, self._taken_cost = self._taken_cost, 0
        self._window_cost -= granted
        return granted

    def drop(self) -> None:
        """Drop what is here, and keep nothing that still comes. Idempotent."""
        self._is_dropped = True
        self._pieces.clear()
        self._partial.clear()
        self._num_partial_bytes = self._partial_cost = 0
        self._budget.drop(self._stream)

    def _joined(self, last: bytes) -> bytes:
        """Return the message that `last` completes."""
        self._budget.release(self._stream, self._partial_cost)
        self._num_partial_bytes = self._partial_cost = 0
        if not self._partial:
            return last
        message = b"".join((*self._partial, last))
        self._partial.clear()
        return message
