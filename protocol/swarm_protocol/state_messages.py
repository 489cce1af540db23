"""The messages by which members of a run ask each other where they are, and for states and result parts by digest.

The answers to `PartRequest`, `ManifestRequest` and `ChunkRequest` are the bytes themselves, which the peer that asked
checks against the digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_protocol import limits, wire
from swarm_protocol.checks import Digest, Name, whole
from swarm_protocol.commit_messages import Attempt, Peers, Step
from swarm_protocol.proto import training_pb2
from swarm_protocol.records import OuterStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingRequest(wire.WireMessage):
    """Asks for the receiver's state. The sender is at `attempt` of `step`. With `hurry`, its group is forming, and the
    receiver should join with what it has.

    A sender that only `watches` is no member: the receiver should not wait for it.
    """

    PROTO = training_pb2.StandingRequest
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    run: Name
    step: Step
    attempt: Attempt = 0
    hurry: bool = False
    watches: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing(wire.WireMessage):
    """The committed state that a peer holds, and the certificate that committed it (empty: the run's initial state).

    While the run's first group forms, `known` are other peers that it has met, and `attempt` is its present attempt.
    `endorsement` is the newest one of the run's author that it knows, as it was signed (empty: none).
    """

    PROTO = training_pb2.Standing
    MAX_BYTES = limits.MAX_CERTIFICATE_BYTES + limits.MAX_READY_BYTES

    outer_step: OuterStep
    state_digest: Digest
    certificate: bytes = b""
    known: Peers = ()
    attempt: Attempt = 0
    endorsement: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest(wire.WireMessage):
    """Asks for the result part `index` of the group `origin_digest`."""

    PROTO = training_pb2.PartRequest
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    origin_digest: Digest
    index: Annotated[int, whole(limits.MAX_GROUP_MEMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRequest(wire.WireMessage):
    """Asks for the manifest of this state."""

    PROTO = training_pb2.ManifestRequest
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    state_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest(wire.WireMessage):
    """Asks for chunk `index` of this state."""

    PROTO = training_pb2.ChunkRequest
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    state_digest: Digest
    index: Annotated[int, whole(2**32 - 1)]
