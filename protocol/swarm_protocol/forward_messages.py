"""What researchers' clients and servers say when blocks are used as a function that keeps nothing.

One stream a call, of either method: Compute and the pieces of the inputs / the pieces of the answer. Forward takes
token ids or hidden states; backward takes hidden states and the gradient of what forward made of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_choice, check_float, check_int, check_name
from swarm_protocol.proto import forward_pb2
from swarm_protocol.rows import Rows

FORWARD_METHOD = "serving.forward"
BACKWARD_METHOD = "serving.backward"
"""The model's name follows after a slash, so a node can serve several."""

FORWARD_CODECS = ("raw", "bf16")
"""Gradients have no place among int8's: their blocks differ too much in size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run blocks `[start, end)` on `num_sequences` of `num_positions` each; `[0, 0)` are the input embeddings."""

    revision: str
    start: int
    end: int
    num_sequences: int
    num_positions: int
    of_tokens: bool
    head: bool
    codec: str
    deadline_s: float

    def __post_init__(self) -> None:
        check_name(self.revision, "revision", max_bytes=limits.MAX_REVISION_BYTES)
        check_int(self.start, "start", high=limits.MAX_BLOCKS - 1)
        check_int(self.end, "end", low=self.start + 1 if self.start else 0, high=limits.MAX_BLOCKS)
        check_int(self.num_positions, "num_positions", low=1, high=limits.MAX_SESSION_TOKENS)
        check_int(self.num_sequences, "num_sequences", low=1, high=limits.MAX_FORWARD_ROWS // self.num_positions)
        check_choice(self.codec, "codec", FORWARD_CODECS)
        check_float(self.deadline_s, "deadline_s", high=limits.MAX_STEP_MS / 1000)
        if self.of_tokens and self.start:
            raise ValueError("token ids are for the first block")
        if not (self.end or self.of_tokens):
            raise ValueError("embeddings are of token ids")

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_positions

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(forward_pb2.Compute, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Compute:
        """Raises PeerViolation."""
        return wire.decode(data, forward_pb2.Compute, wire.flat(cls), max_bytes=limits.MAX_OPEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Rows of a tensor, after those of the piece before."""

    rows: Rows

    def to_bytes(self) -> bytes:
        rows = self.rows
        header = forward_pb2.TensorPiece(codec=rows.codec, num_rows=rows.num_rows, num_columns=rows.num_columns)
        return wire.encode_with_payloads(header, [rows.payload])

    @classmethod
    def from_bytes(cls, data: bytes) -> TensorPiece:
        """Raises PeerViolation. The payload is a view of `data`."""
        return wire.decode_with_payload(
            data,
            forward_pb2.TensorPiece,
            _piece,
            max_bytes=limits.MAX_MESSAGE_BYTES,
            max_header_bytes=limits.MAX_OPEN_BYTES,
        )


def _piece(sent: forward_pb2.TensorPiece, payload: memoryview) -> TensorPiece:
    rows = Rows(codec=sent.codec, num_rows=sent.num_rows, num_columns=sent.num_columns, payload=payload)
    return TensorPiece(rows=rows)
