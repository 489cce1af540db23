"""Frames on a byte stream between two peers: one header, then a body.

    kind 1 byte | length 4 bytes big-endian | body

`MORE` and `DATA` carry pieces of a message. `MORE` is a full piece of CHUNK_BYTES, and `DATA` is the last one, so a
message has no more pieces than its bytes need. `CREDIT` has no body: its length is how much more the other side may
send. `FINISH` ends one direction. `END` and `FAILURE` end both; the body of `FAILURE` is defined by
`swarm_protocol.failure_messages`. `ACK` has no body: its length is the number of further frames that have come, which
the other side need not keep any longer. Only ACK frames are neither counted nor sent again.

`UnreadMessages` keeps the pieces of messages of one stream that wait to be received, and joins them. A piece is charged
to the window and to the budget of all streams when it is announced, before anything is allocated for it. Taking a piece
opens the window again; the budget is charged until the whole message is taken. All is pure, without sockets.

Credit, and not only the transport's own backpressure, bounds what is in flight. So a receiver never has to stop
reading, and notices at once that the other side has left, however much is queued. (HTTP/2 does the same: RFC 9113,
section 5.2.)
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from enum import IntEnum

from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation

from swarm.network.interface import too_long
from swarm.network.peer_budgets import UnreadBudget, UnreadHolder

CHUNK_BYTES = 2**20
"""Bytes of the largest piece. The usual chunk of state is one piece, and need not be joined from several."""

WINDOW_BYTES = 4 * 2**20
"""Bytes that a side may send before the other has consumed any, and so the most that one stream holds unread. It
allows 80 MB/s at a round trip of 50 ms."""

_GRANT_BYTES = WINDOW_BYTES // 4
"""Credit is granted in steps of this size: often enough that a sender never waits in a steady flow."""

FRAME_COST_BYTES = 256
"""Credit that a piece costs besides its bytes, so that credit bounds a flood of empty messages, too."""

HEADER = struct.Struct(">BI")


class Kind(IntEnum):
    MORE = 0
    DATA = 1
    CREDIT = 2
    FINISH = 3
    FAILURE = 4
    END = 5
    ACK = 6


ACK_BYTES = 2**15
"""Unacknowledged frames that have cost this much are acknowledged at once; fewer within about a second. The sender
measures by it how long bytes wait on a slow line."""

RIDING_ACK_BYTES = 2**14
"""Once unacknowledged frames have cost this much, the next frame of any kind takes their acknowledgement along, which
costs no separate write. Where both sides send, they then keep few frames, and reuse the same memory."""

_KINDS = tuple(Kind)  # by number: looked up for every frame, which a call of the enum would make slow

_MAX_LENGTH = {
    Kind.MORE: CHUNK_BYTES,
    Kind.DATA: CHUNK_BYTES,
    Kind.CREDIT: WINDOW_BYTES,
    Kind.FINISH: 0,
    Kind.FAILURE: limits.MAX_FAILURE_BYTES,
    Kind.END: 0,
    Kind.ACK: 2**16,
}


def cost(num_bytes: int) -> int:
    return num_bytes + FRAME_COST_BYTES


def frame(kind: Kind, body: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(body)) + body


def credit(num_bytes: int) -> bytes:
    return HEADER.pack(Kind.CREDIT, num_bytes)


def acknowledgement(num_frames: int) -> bytes:
    return HEADER.pack(Kind.ACK, num_frames)


def body_bytes(kind: Kind, length: int) -> int:
    """Return the number of bytes that follow a header."""
    return 0 if kind in (Kind.CREDIT, Kind.ACK) else length


def pieces(message: bytes) -> Iterator[tuple[Kind, memoryview]]:
    """Yield the pieces of a message. An empty message has one empty piece."""
    view = memoryview(message)
    for start in range(0, len(view) - CHUNK_BYTES, CHUNK_BYTES):
        yield Kind.MORE, view[start : start + CHUNK_BYTES]
    yield Kind.DATA, view[(len(view) - 1) // CHUNK_BYTES * CHUNK_BYTES :] if view else view


def parse_header(header: bytes | memoryview) -> tuple[Kind, int]:
    """Return the kind and the checked length, so that a body is never allocated for an impossible length. Raises
    PeerViolation."""
    number, length = HEADER.unpack(header)
    if number >= len(_KINDS):
        raise PeerViolation(f"stream has a frame of unknown kind {number}")
    kind = _KINDS[number]
    if length > _MAX_LENGTH[kind]:
        raise PeerViolation(f"stream has a {kind.name} frame of {length} bytes, more than {_MAX_LENGTH[kind]}")
    if kind is Kind.MORE and length < CHUNK_BYTES:
        raise PeerViolation(f"stream has a piece of {length} bytes before the last of its message")
    return kind, length


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
        charged = cost(num_bytes)
        if self._window_cost + charged > WINDOW_BYTES:
            raise PeerViolation("the peer sent more than it was allowed to")
        if self.is_finished:
            raise PeerViolation("the peer sent data after it had finished")
        self._window_cost += charged
        self._coming_cost = charged
        return not self._is_dropped and self._budget.charge(self._stream, charged)

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
            charged = cost(len(piece))
            self._taken_cost += charged
            self._partial_cost += charged
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
