"""Defines the messages that convict a member that lied, and the content that the members' signatures cover.

`swarm.training.allreduce.audit` describes audits, and `swarm.training.evidence.evidence` what evidence must show.
Messages with a vote or a report hold more than is signed; an `Equivocation` holds only the signed content, so that this
evidence has a few hundred bytes.

Members sign commitments to slices, reports to a coordinator, and votes. The signed bytes begin with their purpose.
Every later field has a fixed length, ends with a zero byte (which no name contains), follows its number of items, or is
the last one. Whole numbers are big-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import Digest, Name, distinct, named, shared_fields, sized, up_to, whole
from swarm_protocol.commit_messages import MAX_SEQUENCE, Attempt, Step, Vote, VoteKind
from swarm_protocol.identity import SIGNATURE_BYTES, PeerId
from swarm_protocol.proto import equivocation_pb2, proofs_pb2
from swarm_protocol.reduction_messages import AuditedSlice, Leaf
from swarm_protocol.training_messages import Contribution, Group, Ready
from swarm_protocol.version import NetworkId

StatementKind: TypeAlias = Literal["vote", "report", "group"]

FINDING_PURPOSE = "interval"

WRONG_REDUCTION = "wrong_reduction"
WRONG_INTERVAL = "wrong_interval"
EQUIVOCATION = "equivocation"
BAD_SLICE = "bad_slice"
WRONG_ANSWER = "wrong_answer"
WRONG_POSSESSION = "wrong_possession"

EVIDENCE_WANTED = b"\x01"

SLICES_DOMAIN = b"swarm-slices:"
REPORT_DOMAIN = b"swarm-report:"
VOTE_DOMAIN = b"swarm-vote:"
_NUMBER_BYTES = 8
_NOTHING = bytes(32)

Kind = Annotated[str, named(limits.MAX_PURPOSE_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(wire.WireMessage):
    """The evidence that convicts a member of any kind of lie: `body` is the message of this `kind`. Each kind has its
    own checker, and readers reject kinds that they do not know."""

    PROTO = proofs_pb2.Evidence
    MAX_BYTES = limits.MAX_EVIDENCE_BYTES

    kind: Kind
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongReduction(wire.WireMessage):
    """Evidence that convicts the signer of `statement`, in the signed `group`, of a wrong result.

    Its `result` of `leaf`, which `result_proof` shows to be under the stated root, does not follow from the
    contributors' `slices`, which are in the order of the group.
    """

    PROTO = proofs_pb2.WrongReduction
    MAX_BYTES = limits.MAX_EVIDENCE_BYTES

    group: bytes
    statement: bytes
    leaf: Leaf
    result: bytes
    result_proof: bytes
    slices: Annotated[tuple[AuditedSlice, ...], up_to(limits.MAX_GROUP_MEMBERS)]

    def evidence(self) -> Evidence:
        return Evidence(kind=WRONG_REDUCTION, body=self.to_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalFinding(wire.WireMessage):
    """A statement of its signer that it has recomputed the interval of `peer`, which contributed to the group
    `origin_digest`, and that the result is far from the one to which `peer` committed."""

    PROTO = proofs_pb2.IntervalFinding
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    run: Name
    step: Step
    attempt: Attempt
    origin_digest: Digest
    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongInterval(wire.WireMessage):
    """Evidence that accuses `peer` of a pseudo-gradient that does not follow from its interval.

    `certificate` committed the step to which it contributed. `slices` are its own of the leaves that the step's outcome
    draws, with their proofs, and `findings` the signed IntervalFindings: the first is that of the validator that the
    outcome draws.
    """

    PROTO = proofs_pb2.WrongInterval
    MAX_BYTES = limits.MAX_EVIDENCE_BYTES

    certificate: bytes
    peer: PeerId
    slices: Annotated[tuple[AuditedSlice, ...], up_to(limits.MAX_SHOWN_LEAVES)]
    findings: Annotated[tuple[bytes, ...], distinct(limits.MAX_GROUP_MEMBERS)]

    def evidence(self) -> Evidence:
        return Evidence(kind=WRONG_INTERVAL, body=self.to_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSlice(wire.WireMessage):
    """Evidence that convicts `peer`, which committed to its slices of `step` from the state `state_digest` by
    `signature` of `root` (see `slices_message`): the leaf `shown` is in the committed tree of `num_leaves` leaves, and
    no encoder of the run's codec writes such bytes."""

    PROTO = proofs_pb2.BadSlice
    MAX_BYTES = limits.MAX_AUDITED_SLICE_BYTES + limits.MAX_REQUEST_BYTES

    peer: PeerId
    step: Step
    state_digest: Digest
    root: Digest
    signature: Annotated[bytes, sized(SIGNATURE_BYTES)]
    num_leaves: Annotated[int, whole(limits.MAX_LEAVES, low=1)]
    leaf: Leaf
    shown: AuditedSlice

    def evidence(self) -> Evidence:
        return Evidence(kind=BAD_SLICE, body=self.to_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceOffer(wire.WireMessage):
    """Asks a member whether it wants the evidence that its sender holds of a lie of `peer` at outer step `step`. The
    answer is EVIDENCE_WANTED, or empty if the member has banned the peer for this lie or a later one."""

    PROTO = proofs_pb2.EvidenceOffer
    MAX_BYTES = limits.MAX_REQUEST_BYTES

    peer: PeerId
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRequest(wire.WireMessage):
    """Asks a member for the evidence that it holds against currently banned peers, except those in `known`. Each answer
    is one Evidence; then the stream ends."""

    PROTO = proofs_pb2.EvidenceRequest
    MAX_BYTES = limits.MAX_EVIDENCE_REQUEST_BYTES

    run: Name
    known: Annotated[tuple[PeerId, ...], distinct(limits.MAX_BANS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFile(wire.WireMessage):
    """Evidence as stored on disk, with everything that its check needs: the network's id, and the run's signed file.

    Evidence about a server belongs to no run: `run` is empty. A `wrong_possession` proves itself, and the check of a
    `wrong_answer` needs the model's files.
    """

    PROTO = proofs_pb2.EvidenceFile
    MAX_BYTES = limits.MAX_EVIDENCE_FILE_BYTES

    network_id: NetworkId
    run: bytes
    evidence: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivocation(wire.WireMessage):
    """Evidence that convicts `peer` of two different statements of one kind about one attempt.

    `first` and `second` are each a StatedVote or a StatedReport of `peer`, or a group that it signed as the
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
    """The content that the signature of a `Vote` in a run covers."""

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
        """Return the signed content of `vote`. Raises ValueError if it has no signature."""
        return cls(outcome_digest=vote.outcome_digest, **shared_fields(vote, cls))


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedReport(wire.WireMessage):
    """The content that the signature of a report to a coordinator covers: `report`, as a group carries it, for one
    attempt."""

    PROTO = equivocation_pb2.StatedReport
    MAX_BYTES = limits.MAX_READY_BYTES

    step: Step
    attempt: Attempt
    state_digest: Digest
    sequence: Annotated[int, whole(MAX_SEQUENCE)] = 0
    report: Contribution


def slices_message(network_id: str, run: str, step: int, state_digest: bytes, root: bytes) -> bytes:
    """Return the message that a member signs to commit to its slices of `step` of `run`."""
    return SLICES_DOMAIN + _round(network_id, run, step) + state_digest + root


def report_message(network_id: str, place: Group | Ready, sequence: int, report: Contribution) -> bytes:
    """Return the message that a member signs to report ready for the attempt of `place`, which is the report itself or
    a group that carries it. By signing it, the member promises to vote in no earlier attempt at the step.

    `sequence` is that of the last resume order that it knows. The member itself is named by the key that signs.
    """
    stated = StatedReport(
        step=place.step, attempt=place.attempt, state_digest=place.state_digest, sequence=sequence, report=report
    )
    return stated_report_message(network_id, place.run, stated)


def stated_report_message(network_id: str, run: str, stated: StatedReport) -> bytes:
    """Return the message that the signature of this report in `run` covers."""
    report = stated.report
    locked, commitment = report.locked, report.commitment
    return b"".join(
        (
            REPORT_DOMAIN,
            _round(network_id, run, stated.step),
            _number(stated.attempt),
            _number(stated.sequence),
            stated.state_digest,
            _number(report.num_tokens),
            _number(report.num_samples),
            struct.pack(">d", report.loss),
            bytes([report.leaving]),
            _number(report.bytes_per_s),
            commitment.root if commitment else _NOTHING,
            bytes([locked is not None]),
            _number(locked.attempt if locked else 0),
            locked.outcome_digest if locked else _NOTHING,
            _number(len(report.followers)),
            *(
                _number(each.place)
                + _number(each.num_tokens)
                + _number(each.num_samples)
                + bytes([each.leaving])
                + _number(each.steps_left)
                for each in report.followers
            ),
            *(newcomer.encode() + b"\x00" for newcomer in report.newcomers),
            _number(report.steps_left),
            bytes([report.discounted]),
            _number(len(report.effects)),
            *(each.to_bytes(_NUMBER_BYTES, "big", signed=True) for each in report.effects),
            _entrance(report),
        )
    )


def _entrance(report: Contribution) -> bytes:
    """Return the bytes for the peers that enter the run or lose standing by a report; empty if there are none."""
    if not report.credentials and not report.demoted:
        return b""
    digests = b"".join(each.digest() for each in report.credentials)
    return _number(len(report.credentials)) + digests + b"".join(peer.encode() + b"\x00" for peer in report.demoted)


def vote_message(network_id: str, run: str, vote: Vote | StatedVote) -> bytes:
    """Return the message that a member signs to vote in `run`."""
    place = VOTE_DOMAIN + vote.kind.encode() + b"\x00" + _round(network_id, run, vote.step) + _number(vote.attempt)
    return place + vote.group_digest + vote.outcome_digest + vote.state_digest + _number(vote.sequence)


def _round(network_id: str, run: str, step: int) -> bytes:
    return network_id.encode() + b"\x00" + run.encode() + b"\x00" + _number(step)


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "big")
