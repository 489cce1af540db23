"""Defines the messages of the serving calls outside sessions: a model's small files, handovers, and stateless passes.

- Files: a client starts from the small files of a model. - Handover: a sequence's keys and values go from a server that
leaves to the one that takes over. - Forward and backward: researchers' clients use blocks as a function that keeps
nothing. There is one stream for each call: Compute and the pieces of the inputs, then the pieces of the answer. Forward
takes token ids or hidden states; backward takes hidden states and the gradient of forward's output for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated

from swarm_protocol import limits, wire
from swarm_protocol.checks import Checked, Name, check_int, check_text, number, one_of, up_to, whole
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import PeerId
from swarm_protocol.proto import forward_pb2, serving_pb2, session_pb2
from swarm_protocol.rows import Data, Rows, row_bytes
from swarm_protocol.session_frames import FirstBlock, Position, Revision, SequenceId

FILES_METHOD = "serving.files"
"""A call: FilesRequest / FilesResponse. The model's name follows after a slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesRequest(wire.WireMessage):
    """Asks for the small files of `model`: config and tokenizer."""

    PROTO = serving_pb2.FilesRequest
    MAX_BYTES = limits.MAX_OPEN_BYTES

    model: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesResponse(Checked):
    """The small files of the checkpoint `revision`, by name."""

    revision: Revision
    files: Annotated[dict[str, bytes], up_to(limits.MAX_MODEL_FILES)]

    def __post_init__(self) -> None:
        for name, payload in self.files.items():
            check_text(name, "file name", max_chars=limits.MAX_NAME_BYTES, empty=False)
            if len(payload) > limits.MAX_MODEL_FILE_BYTES:
                raise ValueError(f"file {name} has {len(payload)} bytes, more than {limits.MAX_MODEL_FILE_BYTES}")

    def to_bytes(self) -> bytes:
        message = serving_pb2.FilesResponse(
            revision=self.revision,
            files=[serving_pb2.ModelFile(name=name, payload=payload) for name, payload in self.files.items()],
        )
        return wire.encode(message)

    @classmethod
    def from_bytes(cls, data: bytes) -> FilesResponse:
        """Decode an answer. Raises PeerViolation. The reader must check the names."""
        return wire.decode(data, serving_pb2.FilesResponse, _files_response, max_bytes=limits.MAX_MESSAGE_BYTES)


def _files_response(message: serving_pb2.FilesResponse) -> FilesResponse:
    files = {file.name: file.payload for file in message.files}
    if len(files) != len(message.files):
        raise ValueError("files names something twice")
    return FilesResponse(revision=message.revision, files=files)


KV_METHOD = "serving.kv"
"""A stream: KvRequest / KvHeader, then the bytes, in messages. The model's name follows after a slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRequest(wire.WireMessage):
    """Asks for the keys and values of this sequence on blocks `[start, end)`, which its client has allowed."""

    PROTO = session_pb2.KvRequest
    MAX_BYTES = limits.MAX_OPEN_BYTES

    client_peer_id: PeerId
    sequence_id: SequenceId
    start: FirstBlock
    end: int

    def __post_init__(self) -> None:
        check_int(self.end, "end", low=self.start + 1, high=limits.MAX_BLOCKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHeader(wire.WireMessage):
    """The header of a handover: the sequence holds `length` positions. The layout of the bytes is private to one
    version of the software."""

    PROTO = session_pb2.KvHeader
    MAX_BYTES = limits.MAX_OPEN_BYTES

    length: Position


FORWARD_METHOD = "serving.forward"
BACKWARD_METHOD = "serving.backward"
"""The model's name follows after a slash, so a node can serve several."""

FORWARD_CODECS = ("raw", "bf16")
"""Gradients cannot use int8, since their blocks differ too much in size."""

PIECE_BYTES = 2**20
"""Bytes of a piece of a tensor, so that other messages go between."""

HEAD_PIECE_BYTES = 2**25
"""Maximum bytes of the logits, as fp32, of a piece of the head. Choosing among them takes a few times as much."""

MAX_CALL_BYTES = 2**29
"""Bytes that a server holds for one client's calls, as fp32: the input and the output of a call, and while it chooses
logits also the last block's output with the targets, and HEAD_PIECE_BYTES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(wire.WireMessage):
    """A request to run blocks `[start, end)` on `num_sequences` of `num_positions` each; `[0, 0)` are the input
    embeddings.

    Logits are computed for the last `num_last` positions of each sequence, or for all if it is 0. With `num_top`, a row
    has the `num_top` largest logits, then their token ids, then the log-sum-exp of all logits divided by `temperature`,
    where 0 stands for 1. With `has_targets`, the client sends after its inputs a token id for each position, and a row
    has, before the log-sum-exp, the logit of its id; without `num_top` it has only these two numbers.
    """

    PROTO = forward_pb2.Compute
    MAX_BYTES = limits.MAX_OPEN_BYTES

    revision: Revision
    start: FirstBlock
    end: int
    num_sequences: int
    num_positions: Annotated[int, whole(limits.MAX_SESSION_TOKENS, low=1)]
    of_tokens: bool
    head: bool
    codec: Annotated[str, one_of(FORWARD_CODECS)]
    deadline_s: Annotated[float, number(limits.MAX_STEP_MS / 1000)]
    num_top: Annotated[int, whole(limits.MAX_TOP_LOGITS)] = 0
    num_last: int = 0
    temperature: Annotated[float, number(limits.MAX_TEMPERATURE)] = 0.0
    has_targets: bool = False

    def __post_init__(self) -> None:
        check_int(self.end, "end", low=self.start + 1 if self.start else 0, high=limits.MAX_BLOCKS)
        check_int(self.num_last, "num_last", high=self.num_positions)
        if (self.num_top or self.num_last or self.has_targets) and not self.head:
            raise ValueError("num_top, num_last and has_targets are of logits")
        check_int(self.num_sequences, "num_sequences", low=1, high=limits.MAX_FORWARD_ROWS // self.num_positions)
        if self.of_tokens and self.start:
            raise ValueError("token ids are for the first block")
        if not (self.end or self.of_tokens):
            raise ValueError("embeddings are of token ids")

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_positions

    @property
    def chooses_logits(self) -> bool:
        """Tell whether a row of logits is reduced to some numbers."""
        return self.num_top > 0 or self.has_targets

    def answer_shape(self, num_columns: int, *, has_logits: bool) -> tuple[int, int, int]:
        """Return the numbers of sequences, positions and columns of a forward answer, whose rows have `num_columns` or
        are logits."""
        num_positions = self.num_last if has_logits and self.num_last else self.num_positions
        if has_logits and self.chooses_logits:
            num_columns = 2 * min(self.num_top, num_columns) + self.has_targets + 1
        return self.num_sequences, num_positions, num_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """A piece of a tensor: rows that follow those of the piece before."""

    rows: Rows

    def to_bytes(self) -> bytes:
        rows = self.rows
        header = forward_pb2.TensorPiece(codec=rows.codec, num_rows=rows.num_rows, num_columns=rows.num_columns)
        return wire.encode_with_payloads(header, [rows.payload])

    @classmethod
    def from_bytes(cls, data: bytes) -> TensorPiece:
        """Decode a piece. Raises PeerViolation. The payload is a view of `data`."""
        return wire.decode_with_payload(
            data,
            forward_pb2.TensorPiece,
            _piece,
            max_bytes=limits.MAX_MESSAGE_BYTES,
            max_header_bytes=limits.MAX_OPEN_BYTES,
        )

    @classmethod
    def due(cls, data: bytes, codecs: Collection[str], num_rows: int, num_columns: int) -> Rows:
        """Return the rows of the next piece of a tensor, of which `num_rows` are due. Raises PeerViolation for
        others."""
        rows = cls.from_bytes(data).rows
        if rows.codec not in codecs or rows.num_columns != num_columns or rows.num_rows > num_rows:
            raise PeerViolation(
                f"got {rows.num_rows} rows of {rows.num_columns} columns in {rows.codec}, where at most {num_rows} of "
                f"{num_columns} in {' or '.join(codecs)} were due"
            )
        return rows

    @classmethod
    def cut(
        cls, codec: str, num_rows: int, num_columns: int, payload: Callable[[int, int], Data]
    ) -> Iterator[TensorPiece]:
        """Yield a tensor in pieces of about PIECE_BYTES. `payload(start, end)` encodes the rows [start, end)."""
        rows_each = min(limits.MAX_STEP_TOKENS, max(1, PIECE_BYTES // row_bytes(codec, num_columns)))
        for start in range(0, num_rows, rows_each):
            end = min(start + rows_each, num_rows)
            part = payload(start, end)
            yield cls(rows=Rows(codec=codec, num_rows=end - start, num_columns=num_columns, payload=part))


def _piece(sent: forward_pb2.TensorPiece, payload: memoryview) -> TensorPiece:
    rows = Rows(codec=sent.codec, num_rows=sent.num_rows, num_columns=sent.num_columns, payload=payload)
    return TensorPiece(rows=rows)
