"""Requests for what the members of a run hand each other by digest: states, in chunks, and parts of a reduction.

The answers are the bytes themselves, which whoever asked checks against the digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_digest, check_int
from swarm_protocol.proto import training_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """Send me result part `index` of the group `origin_digest`."""

    origin_digest: bytes
    index: int

    def __post_init__(self) -> None:
        check_digest(self.origin_digest, "origin_digest")
        check_int(self.index, "index", high=limits.MAX_GROUP_MEMBERS)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(training_pb2.PartRequest, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> PartRequest:
        """Raises PeerViolation."""
        return wire.decode(data, training_pb2.PartRequest, wire.flat(cls), max_bytes=limits.MAX_REQUEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRequest:
    """Send me the manifest of this state."""

    state_digest: bytes

    def __post_init__(self) -> None:
        check_digest(self.state_digest, "state_digest")

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(training_pb2.ManifestRequest, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> ManifestRequest:
        """Raises PeerViolation."""
        return wire.decode(data, training_pb2.ManifestRequest, wire.flat(cls), max_bytes=limits.MAX_REQUEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest:
    """Send me chunk `index` of this state."""

    state_digest: bytes
    index: int

    def __post_init__(self) -> None:
        check_digest(self.state_digest, "state_digest")
        check_int(self.index, "index", high=2**32 - 1)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(training_pb2.ChunkRequest, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> ChunkRequest:
        """Raises PeerViolation."""
        return wire.decode(data, training_pb2.ChunkRequest, wire.flat(cls), max_bytes=limits.MAX_REQUEST_BYTES)
