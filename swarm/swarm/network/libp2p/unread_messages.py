"""The messages that came over one stream and wait to be received: put together from pieces, within the stream's window.

A piece is charged to the window and to the host's budget when it is announced, before anything is allocated for it.
Taking a piece opens the window again; the budget is charged until the whole message is taken. Pure: knows pieces and
bounds, not sockets.
"""

from __future__ import annotations

from collections import deque

from swarm_protocol.errors import PeerViolation

from swarm.network import framing
from swarm.network.framing import Kind
from swarm.network.interface import too_long
from swarm.network.peer_budgets import UnreadBudget, UnreadHolder

_GRANT_BYTES = framing.WINDOW_BYTES // 4
"""Credit goes back in steps of this size: often enough that the sender never waits in a steady flow."""


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
