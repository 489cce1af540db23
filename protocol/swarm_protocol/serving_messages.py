"""What a client starts from: the small files of a model. What sessions say is in `session_frames`."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_name, check_text
from swarm_protocol.proto import serving_pb2

FILES_METHOD = "serving.files"
"""A call: FilesRequest / FilesResponse. The model's name follows after a slash."""


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


def _files_response(message: serving_pb2.FilesResponse) -> FilesResponse:
    files = {file.name: file.payload for file in message.files}
    if len(files) != len(message.files):
        raise ValueError("files names something twice")
    return FilesResponse(revision=message.revision, files=files)
