"""Defines the messages that commit a state: votes, locks and certificates, and the statements of a run's author.

A round is named by (run, step, attempt): `step` is the outer step that it would commit, one more than the state's. An
outcome is voted on twice: a quorum of prepare votes makes a `Lock`, a quorum of commit votes a `Certificate`.
`training_messages` has the reports of members before that, and the group that they form.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import (
    Checked,
    Digest,
    Name,
    are_sorted,
    distinct,
    one_line,
    sized,
    up_to,
    whole,
)
from swarm_protocol.identity import SIGNATURE_BYTES, PeerId
from swarm_protocol.proto import training_pb2
from swarm_protocol.records import OuterStep

RESUME_PURPOSE = "resume"
ENDORSEMENT_PURPOSE = "endorsement"

VoteKind: TypeAlias = Literal["prepare", "commit"]

MAX_SEQUENCE = 2**53
"""The largest number of a resume order, which is exact as a float. Orders are numbered by the time of their signing."""

Step: TypeAlias = Annotated[int, whole(limits.MAX_OUTER_STEP, low=1)]
Attempt: TypeAlias = Annotated[int, whole(limits.MAX_ATTEMPT)]
BytesPerS: TypeAlias = Annotated[int, whole(int(limits.MAX_LINK_BYTES_PER_S))]
Reason: TypeAlias = Annotated[str, one_line(limits.MAX_FAILURE_TEXT_CHARS)]
Peers: TypeAlias = Annotated[tuple[PeerId, ...], distinct(limits.MAX_GROUP_MEMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Checked):
    """The result that a round would commit: the state that follows from these parts of the group `origin_digest`."""

    origin_digest: Digest
    part_digests: Annotated[tuple[Digest, ...], up_to(limits.MAX_GROUP_MEMBERS)]
    state_digest: Digest

    def digest(self) -> bytes:
        parts = b"".join(self.part_digests)
        return hashlib.sha256(self.origin_digest + self.state_digest + parts).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSignature(Checked):
    """A member's signature of its vote. `place` is its index among the peers that the message with this signature
    refers to."""

    place: Annotated[int, whole(limits.MAX_GROUP_MEMBERS - 1)]
    signature: Annotated[bytes, sized(SIGNATURE_BYTES)]


Votes: TypeAlias = Annotated[tuple[PlacedSignature, ...], up_to(limits.MAX_GROUP_MEMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock(Checked):
    """Prepare votes of a quorum for `outcome`, in the group `group_digest` of `attempt`: no other outcome of that
    attempt can have as many, if fewer than a third lie.

    The places of `votes` are indices among the electors: the members of the state before, or while there are none, the
    members of the outcome's own group, in the order of peer ids.
    """

    attempt: Attempt
    group_digest: Digest
    outcome: Outcome
    votes: Votes

    def __post_init__(self) -> None:
        _check_places(self.votes)

    @property
    def claim(self) -> LockClaim:
        return LockClaim(attempt=self.attempt, outcome_digest=self.outcome.digest())


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LockClaim(Checked):
    """A reference to a lock. Of two locks, the one of the later attempt is higher."""

    attempt: Attempt
    outcome_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote(wire.WireMessage):
    """A member's statement that it holds all parts of `outcome`, and that they give its state.

    `kind` says which of its two votes it is: the prepare vote, of which a quorum makes a `Lock`, or the commit vote, of
    a member that holds the lock, of which a quorum makes a `Certificate`. `state_digest` is the state from which the
    group starts, and `sequence` is that of the author's last resume order: an honest member casts one vote of each kind
    in an attempt from one state after one order. `signature` is the member's signature of
    `proof_messages.vote_message`.
    """

    PROTO = training_pb2.Vote
    MAX_BYTES = limits.MAX_VOTE_BYTES

    run: Name
    step: Step
    attempt: Attempt
    group_digest: Digest
    outcome: Outcome
    kind: VoteKind
    signature: Annotated[bytes, up_to(SIGNATURE_BYTES)] = b""
    state_digest: Digest
    sequence: Annotated[int, whole(MAX_SEQUENCE)] = 0

    @property
    def outcome_digest(self) -> bytes:
        return self.outcome.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReply(wire.WireMessage):
    """The answer to a vote: the rate at which the voter's slices arrived, in bytes per second (0: not measured).
    Members learn their bandwidth from it."""

    PROTO = training_pb2.VoteReply
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    bytes_per_s: BytesPerS = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOrder(wire.WireMessage):
    """The author's signed order that `roster` goes on, without the others, from the state with this digest and outer
    step.

    Members follow only the order with the highest `sequence` that they know.
    """

    PROTO = training_pb2.ResumeOrder
    MAX_BYTES = limits.MAX_READY_BYTES

    run: Name
    sequence: Annotated[int, whole(MAX_SEQUENCE, low=1)]
    outer_step: OuterStep
    state_digest: Digest
    roster: Peers

    def __post_init__(self) -> None:
        _check_roster(self.roster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endorsement(wire.WireMessage):
    """The author's signed statement that the run's history contains the state with this digest and outer step.

    `roster` are the members of that state, whose votes decide the next one, and `next_attempt` is the first attempt of
    the round after it. `order_sequence` is the sequence of the resume order in force there; 0: none. The endorsement
    with the highest `sequence` counts. Unlike a resume order it commits nothing: it only shows peers without a state
    which history is the run's.
    """

    PROTO = training_pb2.Endorsement
    MAX_BYTES = limits.MAX_READY_BYTES

    run: Name
    sequence: Annotated[int, whole(MAX_SEQUENCE, low=1)]
    order_sequence: Annotated[int, whole(MAX_SEQUENCE)] = 0
    outer_step: Step
    next_attempt: Attempt = 0
    state_digest: Digest
    roster: Peers

    def __post_init__(self) -> None:
        _check_roster(self.roster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate(wire.WireMessage):
    """A signed group and commit votes of its members for `outcome`, by the voters' places in the group;
    `swarm.training.state.certificate` counts them.

    Or it is the author's signed resume `order`, which commits a state as votes do.
    """

    PROTO = training_pb2.Certificate
    MAX_BYTES = limits.MAX_CERTIFICATE_BYTES

    group: bytes = b""
    order: bytes = b""
    outcome: Outcome | None = None
    votes: Votes = ()

    def __post_init__(self) -> None:
        if bool(self.order) == bool(self.group or self.votes) or bool(self.group) != (self.outcome is not None):
            raise ValueError("it holds neither a group with votes nor an order, or both")
        _check_places(self.votes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(wire.WireMessage):
    """The sender leaves this attempt, for this reason, and casts no more votes in it."""

    PROTO = training_pb2.Abort
    MAX_BYTES = limits.MAX_ABORT_BYTES

    run: Name
    step: Step
    attempt: Attempt
    group_digest: Digest
    reason: Reason
    accused: Peers = ()


def _check_roster(roster: Peers) -> None:
    if not roster or not are_sorted(roster):
        raise ValueError("the roster is empty, or not sorted and distinct")


def _check_places(votes: tuple[PlacedSignature, ...]) -> None:
    places = [each.place for each in votes]
    if not are_sorted(places):
        raise ValueError("the votes are not sorted and distinct")
