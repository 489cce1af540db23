"""What clients and servers of a model say to each other: a session's stream, and the files a client starts from.

A tensor's byte count is checked here against its shape; that its numbers are finite, whoever decodes it must check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_choice, check_float, check_int, check_name, check_text
from swarm_protocol.proto import serving_pb2

SESSION_METHOD = "serving.session"
"""A stream: Open, Steps / Ready, StepResults. The model's name follows after a slash, so a node can serve several."""

FILES_METHOD = "serving.files"
"""A call: FilesRequest / FilesResponse. The model's name follows after a slash."""

ITEM_BYTES = {"int64": 8, "float32": 4}
CODECS = ("raw",)
WANTS = ("nothing", "last", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Ask for a session on blocks `[start, end)` with room for `max_tokens`."""

    session_id: str
    model: str
    revision: str
    start: int
    end: int
    max_tokens: int

    def __post_init__(self) -> None:
        check_name(self.session_id, "session_id", max_bytes=limits.MAX_SESSION_ID_BYTES)
        check_name(self.model, "model")
        check_name(self.revision, "revision", max_bytes=limits.MAX_REVISION_BYTES)
        check_int(self.start, "start", high=limits.MAX_BLOCKS - 1)
        check_int(self.end, "end", low=self.start + 1, high=limits.MAX_BLOCKS)
        check_int(self.max_tokens, "max_tokens", low=1, high=limits.MAX_SESSION_TOKENS)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(serving_pb2.Open, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Open:
        """Raises PeerViolation."""
        return wire.decode(data, serving_pb2.Open, wire.flat(cls), max_bytes=limits.MAX_OPEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The session is open and its cache room reserved."""

    max_step_tokens: int

    def __post_init__(self) -> None:
        check_int(self.max_step_tokens, "max_step_tokens", low=1, high=limits.MAX_STEP_TOKENS)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(serving_pb2.Ready, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Ready:
        """Raises PeerViolation."""
        return wire.decode(data, serving_pb2.Ready, wire.flat(cls), max_bytes=limits.MAX_OPEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """A vector or matrix, row-major and little-endian, with no empty side."""

    dtype: str
    shape: tuple[int, ...]
    codec: str = "raw"
    payload: bytes

    def __post_init__(self) -> None:
        check_choice(self.dtype, "dtype", ITEM_BYTES)
        check_choice(self.codec, "codec", CODECS)
        if len(self.shape) not in (1, 2):
            raise ValueError(f"shape has {len(self.shape)} sides, not 1 or 2")
        for side in self.shape:
            check_int(side, "shape", low=1, high=limits.MAX_MESSAGE_BYTES)
        num_bytes = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.payload) != num_bytes:
            raise ValueError(f"payload has {len(self.payload)} bytes, and shape {self.shape} needs {num_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Token ids `[T]` (int64) or hidden states `[T, H]` (float32) for positions from `position` on."""

    position: int
    want: str
    tensor: TensorBytes

    def __post_init__(self) -> None:
        check_int(self.position, "position", high=limits.MAX_SESSION_TOKENS)
        check_choice(self.want, "want", WANTS)
        check_int(self.tensor.shape[0], "tokens in a step", low=1, high=limits.MAX_STEP_TOKENS)

    def to_bytes(self) -> bytes:
        message = serving_pb2.Step(position=self.position, want=self.want, tensor=_tensor_message(self.tensor))
        return wire.encode(message)

    @classmethod
    def from_bytes(cls, data: bytes) -> Step:
        """Raises PeerViolation."""
        return wire.decode(data, serving_pb2.Step, _step, max_bytes=limits.MAX_MESSAGE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Hidden states `[T, H]`, logits `[T, V]` or nothing. `leave_within_s`: the server drains; go elsewhere."""

    position: int
    compute_ms: float
    queue_ms: float
    leave_within_s: float | None = None
    tensor: TensorBytes | None = None

    def __post_init__(self) -> None:
        check_int(self.position, "position", low=1, high=limits.MAX_SESSION_TOKENS)
        check_float(self.compute_ms, "compute_ms", high=limits.MAX_STEP_MS)
        check_float(self.queue_ms, "queue_ms", high=limits.MAX_STEP_MS)
        if self.leave_within_s is not None:
            check_float(self.leave_within_s, "leave_within_s", high=limits.MAX_RETRY_AFTER_S)

    def to_bytes(self) -> bytes:
        message = serving_pb2.StepResult(
            position=self.position,
            compute_ms=self.compute_ms,
            queue_ms=self.queue_ms,
            leave_within_s=self.leave_within_s,
            tensor=None if self.tensor is None else _tensor_message(self.tensor),
        )
        return wire.encode(message)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepResult:
        """Raises PeerViolation."""
        return wire.decode(data, serving_pb2.StepResult, _step_result, max_bytes=limits.MAX_MESSAGE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesRequest:
    """Ask for the small files of `model`: config and tokenizer."""

    model: str

    def __post_init__(self) -> None:
        check_name(self.model, "model")

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(serving_pb2.FilesRequest, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> FilesRequest:
        """Raises PeerViolation."""
        return wire.decode(data, serving_pb2.FilesRequest, wire.flat(cls), max_bytes=limits.MAX_OPEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesResponse:
    """The small files of the checkpoint `revision`, by name."""

    revision: str
    files: dict[str, bytes]

    def __post_init__(self) -> None:
        check_name(self.revision, "revision", max_bytes=limits.MAX_REVISION_BYTES)
        if len(self.files) > limits.MAX_MODEL_FILES:
            raise ValueError(f"files has {len(self.files)} items, more than {limits.MAX_MODEL_FILES}")
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
        """Raises PeerViolation. Whether a name is one that was meant, the reader must check."""
        return wire.decode(data, serving_pb2.FilesResponse, _files_response, max_bytes=limits.MAX_MESSAGE_BYTES)


def _tensor_message(tensor: TensorBytes) -> serving_pb2.Tensor:
    return serving_pb2.Tensor(dtype=tensor.dtype, shape=tensor.shape, codec=tensor.codec, payload=tensor.payload)


def _tensor(message: serving_pb2.Tensor) -> TensorBytes:
    return TensorBytes(dtype=message.dtype, shape=tuple(message.shape), codec=message.codec, payload=message.payload)


def _step(message: serving_pb2.Step) -> Step:
    return Step(position=message.position, want=message.want, tensor=_tensor(message.tensor))


def _step_result(message: serving_pb2.StepResult) -> StepResult:
    return StepResult(
        position=message.position,
        compute_ms=message.compute_ms,
        queue_ms=message.queue_ms,
        leave_within_s=message.leave_within_s if message.HasField("leave_within_s") else None,
        tensor=_tensor(message.tensor) if message.HasField("tensor") else None,
    )


def _files_response(message: serving_pb2.FilesResponse) -> FilesResponse:
    files = {file.name: file.payload for file in message.files}
    if len(files) != len(message.files):
        raise ValueError("files names something twice")
    return FilesResponse(revision=message.revision, files=files)
