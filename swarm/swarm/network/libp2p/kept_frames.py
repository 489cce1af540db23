"""Keeps the frames and messages of one stream: sent frames that the other side has not acknowledged, to be sent again
over another connection; the number of received frames, for acknowledgements; and messages that wait to be received.

Two budgets bound what all streams of a peer, and of the host, keep: one for sent frames, one for unread pieces. A
stream whose sent frames find no room keeps none from then on, and ends with its connection. A piece of a message is
charged to the window and to the budget when it is announced, before anything is allocated for it. Taking a piece opens
the window again; the budget is charged until the whole message is taken. Pure, without sockets.
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
"""Maximum unacknowledged bytes of all streams to one peer: eight full windows. A peer acknowledges every 2 MiB of a
stream at once, and the rest within about a second."""

HOST_BYTES = 256 * 2**20
"""Maximum unacknowledged bytes of all streams to all peers."""

_GRANT_BYTES = framing.WINDOW_BYTES // 4
"""Credit is granted in steps of this size: often enough that a sender never waits in a steady flow."""

Frame = tuple[bytes | memoryview, ...]
"""A header and perhaps a body, to be written one after the other. They must not change while the frame is kept."""


class SentFrames:
    """The sent frames of one stream that were not acknowledged. It implements `peer_budgets.UnreadHolder`."""

    def __init__(self, peer_id: str, budget: UnreadBudget) -> None:
        self.peer_id = peer_id
        self.can_resend = True  # False once the budget had no room, so that frames cannot be sent again
        self._budget = budget
        self._frames: deque[tuple[Frame, int]] = deque()  # each with its cost
        self._num_sent = 0
        self._num_acknowledged = 0

    def add(self, frame: Frame) -> None:
        """Count a sent frame, and keep it if frames can be sent again."""
        self._num_sent += 1
        if not self.can_resend:
            return
        cost = framing.cost(sum(map(len, frame)))
        self._frames.append((frame, cost))
        self._budget.charge(self, cost)

    def acknowledge(self, num_frames: int) -> None:
        """Forget the `num_frames` oldest frames. Raises PeerViolation if fewer are unacknowledged."""
        self._num_acknowledged += num_frames
        if self._num_acknowledged > self._num_sent:
            raise PeerViolation("the peer acknowledged more than it was sent", peer_id=self.peer_id)
        if self.can_resend:
            self._budget.release(self, sum(self._frames.popleft()[1] for _ in range(num_frames)))

    def to_resend(self, num_received: int) -> Iterator[Frame]:
        """Return the frames to send again: all after the first `num_received` frames of the stream.

        Raises PeerViolation if `num_received` contradicts earlier acknowledgements, or is more than was sent.
        """
        if num_received < self._num_acknowledged:
            raise PeerViolation("the peer claims to have received less than it acknowledged", peer_id=self.peer_id)
        self.acknowledge(num_received - self._num_acknowledged)
        return (frame for frame, _ in self._frames)

    def give_way(self, _refusal: PeerRefused) -> None:
        self.can_resend = False
        self._frames.clear()

    def drop(self) -> None:
        """Forget all frames, since the stream has ended. Idempotent."""
        self.can_resend = False
        self._frames.clear()
        self._budget.drop(self)


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


class UnreadMessages:
    """The unread messages of one stream, each of at most `max_message_bytes`."""

    def __init__(self, stream: UnreadHolder, budget: UnreadBudget, max_message_bytes: int) -> None:
        self.is_finished = False  # whether the other side has finished sending
        self._stream = stream
        self._budget = budget
        self._max_message_bytes = max_message_bytes
        self._is_dropped = False
        self._pieces: deque[tuple[Kind, bytes]] = deque()
        self._partial: list[bytes] = []  # taken pieces of a message whose last piece has not come
        self._num_partial_bytes = 0
        self._partial_cost = 0
        self._coming_cost = 0  # of the announced piece, until it has come
        self._window_cost = 0  # of announced pieces whose credit was not granted again
        self._taken_cost = 0  # of taken pieces, to be granted in the next step

    def announce(self, num_bytes: int) -> bool:
        """Charge a piece that begins to come, and return whether to keep it. Raises PeerViolation."""
        cost = framing.cost(num_bytes)
        if self._window_cost + cost > framing.WINDOW_BYTES:
            raise PeerViolation("the peer sent more than it was allowed to")
        if self.is_finished:
            raise PeerViolation("the peer sent data after it had finished")
        self._window_cost += cost
        self._coming_cost = cost
        return not self._is_dropped and self._budget.charge(self._stream, cost)

    def cut_off(self) -> None:
        """Forget the announced piece, whose rest will not come: the other side sends it again."""
        self._window_cost -= self._coming_cost
        self._budget.release(self._stream, self._coming_cost)
        self._coming_cost = 0

    def add(self, kind: Kind, piece: bytes) -> None:
        """Add the announced piece, which has come. `kind` is MORE, or DATA for the last piece of its message."""
        self._coming_cost = 0
        if not self._is_dropped:  # it may have been announced before everything was dropped
            self._pieces.append((kind, piece))

    def take(self) -> bytes | None:
        """Take the next message, or return None if it is not complete. Raises PeerViolation for a message that is too
        long; then nothing is kept from then on."""
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
        """Return the bytes of credit to grant to the other side now, and count them as granted; 0 if too few for a
        frame."""
        if self._taken_cost < _GRANT_BYTES:
            return 0
        granted, self._taken_cost = self._taken_cost, 0
        self._window_cost -= granted
        return granted

    def drop(self) -> None:
        """Drop all pieces, and keep nothing that still comes. Idempotent."""
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
