"""The message that convicts a member of two statements about one attempt that differ, and its parts.

A vote and a report travel in messages that hold more than is signed. Here they are what is signed, so that evidence has
a few hundred bytes. `swarm.training.evidence.equivocation` says what convicts, and why no honest member can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import Digest, shared_fields, sized, whole
from swarm_protocol.commit_messages import MAX_SEQUENCE, Attempt, Step, Vote, VoteKind
from swarm_protocol.identity import SIGNATURE_BYTES, PeerId
from swarm_protocol.proof_messages import EQUIVOCATION, Evidence
from swarm_protocol.proto import equivocation_pb2
from swarm_protocol.training_messages import Contribution

StatementKind: TypeAlias = Literal["vote", "report", "group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivocation(wire.WireMessage):
    """Holds what convicts `peer` of two statements of one kind, about one attempt, that differ.

    `first` and `second` are each a StatedVote or a StatedReport of `peer`, or a group that it has signed as the
    coordinator.
    """

    PROTO = equivocation_pb2.Equivocation
    MAX_BYTES = limits.MAX_EQUIVOCATION_BYTES

    statement: StatementKind
    peer: PeerId
    first: bytes
    second: bytes

    def evidence(self) -> Evidence:
        return Evidence(kind=EQUIVOCATION, body=self.to_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedVote(wire.WireMessage):
    """Holds what the signature of a `Vote` in a run covers."""

    PROTO = equivocation_pb2.StatedVote
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    step: Step
    attempt: Attempt
    kind: VoteKind
    state_digest: Digest
    sequence: Annotated[int, whole(MAX_SEQUENCE)] = 0
    group_digest: Digest
    outcome_digest: Digest
    signature: Annotated[bytes, sized(SIGNATURE_BYTES)]

    @classmethod
    def of(cls, vote: Vote) -> StatedVote:
        """Raises ValueError if nobody has signed `vote`."""
        return cls(outcome_digest=vote.outcome.digest(), **shared_fields(vote, cls))


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedReport(wire.WireMessage):
    """Holds what the signature of a report to a coordinator covers: `report`, as a group carries it, for one
    attempt."""

    PROTO = equivocation_pb2.StatedReport
    MAX_BYTES = limits.MAX_READY_BYTES

    step: Step
    attempt: Attempt
    state_digest: Digest
    sequence: Annotated[int, whole(MAX_SEQUENCE)] = 0
    report: Contribution

    def __post_init__(self) -> None:
        if not isinstance(self.report, Contribution):
            raise ValueError("it has no report")  # noqa: TRY004 - absent in the message
