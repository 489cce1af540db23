"""Frames on a byte stream between two peers: one header, then a body.

    kind 1 byte | length 4 bytes big-endian | body

`MORE` and `DATA` carry pieces of a message. `MORE` is a full piece of CHUNK_BYTES, and `DATA` is the last one, so a
message has no more pieces than its bytes need. `CREDIT` has no body: its length is how much more the other side may
send. `FINISH` ends one direction. `END` and `FAILURE` end both; the body of `FAILURE` is defined by
`swarm_protocol.failure_messages`. `ACK` has no body: its length is the number of further frames that have come, which
the other side need not keep any longer. Only ACK frames are neither counted nor sent again.
Pure functions of bytes, without sockets.

Credit, and not only the transport's own backpressure, bounds what is in flight. So a receiver never has to stop
reading, and notices at once that the other side has left, however much is queued. (HTTP/2 does the same: RFC 9113,
section 5.2.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation

CHUNK_BYTES = 2**20
"""Bytes of the largest piece. The usual chunk of state is one piece, and need not be joined from several."""

WINDOW_BYTES = 4 * 2**20
"""Bytes that a side may send before the other has consumed any, and so the most that one stream holds unread. It
allows 80 MB/s at a round trip of 50 ms."""

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
