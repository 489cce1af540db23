"""How a seat's keys and values go from a server that leaves to the one that takes over."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_int
from swarm_protocol.identity import check_peer_id
from swarm_protocol.proto import session_pb2
from swarm_protocol.session_frames import check_sequence_id

KV_METHOD = "serving.kv"
"""A stream: KvRequest / KvHeader, then the bytes, in messages. The model's name follows after a slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRequest:
    """Send me the keys and values of this seat on blocks `[start, end)`; its client has allowed it."""

    client_peer_id: str
    sequence_id: bytes
    start: int
    end: int

    def __post_init__(self) -> None:
        check_peer_id(self.client_peer_id)
        check_sequence_id(self.sequence_id)
        check_int(self.start, "start", high=limits.MAX_BLOCKS - 1)
        check_int(self.end, "end", low=self.start + 1, high=limits.MAX_BLOCKS)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(session_pb2.KvRequest, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> KvRequest:
        """Raises PeerViolation."""
        return wire.decode(data, session_pb2.KvRequest, wire.flat(cls), max_bytes=limits.MAX_OPEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHeader:
    """The seat holds `length` positions. How they are laid out is between two servers of one version."""

    length: int

    def __post_init__(self) -> None:
        check_int(self.length, "length", high=limits.MAX_SESSION_TOKENS)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(session_pb2.KvHeader, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> KvHeader:
        """Raises PeerViolation."""
        return wire.decode(data, session_pb2.KvHeader, wire.flat(cls), max_bytes=limits.MAX_OPEN_BYTES)
