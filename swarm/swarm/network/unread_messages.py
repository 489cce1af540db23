"""Keeps the pieces of messages of one stream that wait to be received, and joins them.

A piece is charged to the window and to the budget of all streams when it is announced, before anything is allocated for
it. Taking a piece opens the window again; the budget is charged until the whole message is taken. Pure, without
sockets.
"""

from __future__ import annotations

from collections import deque

from swarm_protocol.errors import PeerViolation

from swarm.network import framing
from swarm.network.framing import Kind
from swarm.network.interface import too_long
from swarm.network.peer_budgets import UnreadBudget, UnreadHolder

_GRANT_BYTES = framing.WINDOW_BYTES // 4
"""Credit is granted in steps of this size: often enough that a sender never waits in a steady flow."""


class UnreadMessages:
    """The unread messages of one stream, each of at most `max_message_bytes`."""

    def __init__(self, stream: UnreadHolder, budget: UnreadBudget, max_message_bytes: int) -> None:
        self.is_finished = False  # whether the other side has finished sending
        self.max_message_bytes = max_message_bytes
        self._stream = stream
        self._budget = budget
        self._is_dropped = False
        self._pieces: deque[tuple[Kind, bytes | memoryview]] = deque()
        self._partial: list[bytes | memoryview] = []  # taken pieces of a message whose last piece has not come
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

    def add(self, kind: Kind, piece: bytes | memoryview) -> None:
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
            self._partial.append(piece)
            if self._num_partial_bytes > self.max_message_bytes:
                self.drop()
                raise too_long(self.max_message_bytes, self._stream.peer_id)
            if kind == Kind.DATA:
                self._budget.release(self._stream, self._partial_cost)
                message = b"".join(self._partial)  # a single piece is not copied
                self._partial.clear()
                self._num_partial_bytes = self._partial_cost = 0
                return message
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
