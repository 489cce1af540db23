"""Defines the messages between two members of a run outside its rounds: the standing of each, requests for states and
result parts by digest, and the messages between a head and each follower, over a stream of their own.

The answers to `PartRequest`, `ManifestRequest` and `ChunkRequest` are the bytes themselves, which the asker checks
against the digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import Digest, Name, whole
from swarm_protocol.commit_messages import Attempt, Peers, Step
from swarm_protocol.proto import training_pb2
from swarm_protocol.records import Loss, OuterStep
from swarm_protocol.run_credentials import RunCredential
from swarm_protocol.training_messages import Work, check_work

FollowKind: TypeAlias = Literal["welcome", "full", "hurry", "late", "committed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingRequest(wire.WireMessage):
    """Asks for the receiver's state. The sender is at `attempt` of `step`. With `hurry`, its group is forming, and the
    receiver should join with the work that it has.

    A sender that only `watches` is no member, and the receiver should not wait for it.
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
    `endorsement` is the newest endorsement of the run's author that it knows, as signed (empty: none).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowRequest(wire.WireMessage):
    """The first message on a trainer's stream to its head, over which the trainer will bring its work of `step` from
    the state `state_digest`. A newcomer may show a `credential`."""

    PROTO = training_pb2.FollowRequest
    MAX_BYTES = limits.MAX_FOLLOW_BYTES

    run: Name
    step: Step
    state_digest: Digest
    credential: RunCredential | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowReply(wire.WireMessage):
    """A head's message to a follower over its stream. `kind`:

    welcome    the head waits for its work
    full       the head takes no more trainers
    hurry      the others are ready: the follower should end its interval with the work that it has done
    late       the head has gone to the round without its work
    committed  `certificate` proves the new state (empty: the run's initial state)
    """

    PROTO = training_pb2.FollowReply
    MAX_BYTES = limits.MAX_CERTIFICATE_BYTES

    kind: FollowKind
    certificate: bytes = b""

    def __post_init__(self) -> None:
        if self.certificate and self.kind != "committed":
            raise ValueError("a certificate comes with kind 'committed' only")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerWork(wire.WireMessage):
    """A follower's work for its head, with the fields of a `Contribution`. The encoded frames follow, if it has
    tokens."""

    PROTO = training_pb2.FollowerWork
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    num_tokens: Work = 0
    num_samples: Work = 0
    loss: Loss = 0.0
    leaving: bool = False

    def __post_init__(self) -> None:
        check_work(self.num_tokens, self.num_samples)
