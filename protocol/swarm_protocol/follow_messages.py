"""The messages between a head of a round and the trainers that follow it, over one stream for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import Digest, Name
from swarm_protocol.commit_messages import Step
from swarm_protocol.proto import training_pb2
from swarm_protocol.records import Loss
from swarm_protocol.run_credentials import RunCredential
from swarm_protocol.training_messages import Work, check_work

FollowKind: TypeAlias = Literal["welcome", "full", "hurry", "late", "committed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowRequest(wire.WireMessage):
    """A trainer that holds `state_digest` opens a stream to its head, over which it will bring its work of `step`. A
    newcomer may show a `credential`."""

    PROTO = training_pb2.FollowRequest
    MAX_BYTES = limits.MAX_FOLLOW_BYTES

    run: Name
    step: Step
    state_digest: Digest
    credential: RunCredential | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowReply(wire.WireMessage):
    """Holds what a head says to a follower over its stream. `kind`:

    welcome    the head waits for its work
    full       the head takes no more trainers
    hurry      the others are ready: the follower should end its interval with what it has done
    late       the head has gone to the round without its work
    committed  `certificate` says what the state is now (empty: the run's initial state)
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
    """Holds what a follower brings to its head, as in a `Contribution`. Its encoded frames follow, if it has tokens."""

    PROTO = training_pb2.FollowerWork
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    num_tokens: Work = 0
    num_samples: Work = 0
    loss: Loss = 0.0
    leaving: bool = False

    def __post_init__(self) -> None:
        check_work(self.num_tokens, self.num_samples)
