"""Evidence that a member's contribution does not follow from its interval: who validates which intervals, how a
contribution is compared with the recomputed interval, and which findings convict.

The draw is a pure function of the step's outcome, which contains the digests of all parts' results: nobody can choose
it alone, and nobody knew it when members committed to their contributions. All holders of the step's certificate draw
the same. The work of members with followers is not drawn: it combines several intervals.

Equal devices and software give equal bytes. Others round differently, and training amplifies this: over an interval of
the default run to a few percent in float32, and to a sixth if one of the two computes in bfloat16
(`tests/bench/test_bench_validation.py`). Contributions that are noise, come from other data, or are negated, scaled or
repeated differ by more than the run's `validation_tolerance`. Comparing blocks.

A validator's finding alone convicts nobody. Members that receive it recompute the interval, and sign what they find.
Evidence convicts once more than a third of the step's deciding members, and at least two, have signed, so that all
members ban at about the same time. If the accused and one other member are the only deciding ones, that member's own
finding convicts, but only for itself. Findings of members on probation do not count, since keys cost nothing. Anyone
with the state that the step began from, and the run's data, can repeat the check.

A certificate does not prove that its members are the run's. So a member accepts only the outcome that its own history
has of that step. Everybody else accepts only a certificate with the accused's own commit vote: nobody can forge it, and
an honest member does not vote in a made-up group.

Only the validator that the step's outcome draws can accuse, by the leaves that the outcome draws. So nobody can make
others recompute again and again, or choose the leaves in which devices differ most.

`IntervalAccusations` holds the accusations that this member received, with the findings gathered for each, until these
convict. `Convictions` owns it and calls it for one piece of evidence at a time; checks run in the executor.

Shapes: N values of the flat vector, L of a leaf.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from swarm_compression import Codec, CodecError, get_codec
from swarm_protocol import limits
from swarm_protocol.commit_messages import Certificate, Outcome
from swarm_protocol.envelope import issued_at
from swarm_protocol.errors import PeerViolation
from swarm_protocol.proof_messages import WRONG_INTERVAL, Evidence, IntervalFinding, WrongInterval
from swarm_protocol.reduction_messages import AuditedSlice
from swarm_protocol.training_messages import Contribution, Group
from torch import Tensor

from swarm.newest_items import NewestItems
from swarm.threads import in_executor
from swarm.training.allreduce.committed_slices import is_leaf
from swarm.training.allreduce.parts import check_frame, leaf_at, num_leaves, num_values, part_leaves
from swarm.training.evidence.bans import UnprovenToOutsiders, Verdict
from swarm.training.round.quorum import enough_for_one_honest
from swarm.training.run.run_config import RunConfig
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm.training.state.lease import LeaseStripe, SampleIds, lease_of
from swarm.training.state.run_context import RunContext

AccusationKey: TypeAlias = tuple[str, int, Outcome]
"""The member, the step, and the outcome that draws its interval. A made-up outcome has another key, so it hides
none."""

MAX_ACCUSATIONS = 16
"""Number of accusations whose findings are gathered. Each step draws few."""

_DIGEST_VALUES = 1 << 64


def draw_validators(origin: Group, outcome: Outcome, rate: float) -> Mapping[str, str]:
    """Return the validator of each member whose interval is validated, by member.

    Each contributor of `origin` without followers is drawn with probability `rate`. A validator owns a part of the
    vector, and so has the member's slices of it. It validates one interval, and at most half of the members validate,
    so that others train in the next step.
    """
    if not rate or not origin.part_values:
        return {}
    seed = _seed(origin, outcome)
    candidates = [peer for peer, count in zip(origin.peer_ids, origin.part_values, strict=True) if count]
    most, found = len(origin.members) // 2, dict[str, str]()
    alone = [member.peer_id for member in origin.contributors if not member.followers]
    for member in sorted(alone, key=lambda peer: _number(seed, "member", peer)):
        if len(found) == most or _number(seed, "member", member) >= rate * _DIGEST_VALUES:
            break
        free = [peer for peer in candidates if peer != member and peer not in found.values()]
        if free:
            found[member] = min(free, key=lambda peer: _number(seed, "validator", member, peer))
    return found


def draw_leaves(origin: Group, outcome: Outcome, member: str, validator: str) -> tuple[int, ...]:
    """Return the leaves of `member`'s slice for the part of `validator` that are compared: MAX_SHOWN_LEAVES, or all."""
    seed = _seed(origin, outcome)
    leaves = part_leaves(origin, origin.peer_ids.index(validator))
    drawn = sorted(leaves, key=lambda leaf: _number(seed, "leaf", member, str(leaf)))
    return tuple(sorted(drawn[: limits.MAX_SHOWN_LEAVES]))


def _seed(origin: Group, outcome: Outcome) -> bytes:
    parts = b"".join(outcome.part_digests)
    return hashlib.sha256(f"swarm-intervals:{origin.run}/{origin.step}:".encode() + parts).digest()


def _number(seed: bytes, *words: str) -> int:
    return int.from_bytes(hashlib.sha256(seed + "/".join(words).encode()).digest()[:8], "big")


Tier: TypeAlias = Literal["exact", "close", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """`tier`: the leaves are equal, within the run's tolerance, or wrong. `distance` is the norm of their difference
    relative to the norm of the recomputed leaves; inf if only the recomputed leaves are zero."""

    tier: Tier
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalStart:
    """The inputs of an interval of outer step `step`: the committed weights, and the stripes of its leases."""

    step: int
    theta_N: Tensor
    stripes: tuple[LeaseStripe, ...]

    def samples_of(self, member: Contribution, config: RunConfig) -> SampleIds:
        """Return the samples that `member` says it has used, in their order."""
        lease = lease_of(self.stripes, self.step, member.peer_id, config.samples_per_interval)
        return SampleIds(lease)[: member.own_samples]


def likeness(
    group: Group, codec: Codec, leaves: Sequence[int], slices: Sequence[AuditedSlice], delta_N: Tensor, most: float
) -> Likeness:
    """Compare the committed `slices` of `leaves` with the recomputed `delta_N`. `most` is the largest distance that is
    not wrong. A slice that cannot be decoded is wrong, since the member committed to it."""
    off = size = 0.0
    is_exact = True
    for leaf, each in zip(leaves, slices, strict=True):
        where = leaf_at(group.num_values, leaf)
        mine = codec.encode(delta_N[where])
        is_exact = is_exact and mine == each.data
        try:
            mine_L, claimed_L = (codec.decode(data, num_values(where)).double() for data in (mine, each.data))
        except CodecError:
            return Likeness(tier="wrong", distance=math.inf)
        off += float((claimed_L - mine_L).square().sum())
        size += float(mine_L.square().sum())
    if is_exact:
        return Likeness(tier="exact", distance=0.0)
    distance = math.sqrt(off / size) if size else (math.inf if off else 0.0)
    return Likeness(tier="close" if distance <= most else "wrong", distance=distance)


def check_slices(
    group: Group, codec: Codec, member: Contribution, leaves: Sequence[int], slices: Sequence[AuditedSlice]
) -> None:
    """Raises PeerViolation unless `slices` are those of `leaves` to which `member` has committed, and can be
    decoded."""
    total = num_leaves(group.num_values)
    if member.commitment is None or len(leaves) != len(slices):
        raise PeerViolation("evidence has other leaves than the step's outcome draws")
    for leaf, each in zip(leaves, slices, strict=True):
        if not is_leaf(member.commitment.root, total, leaf, each.data, each.proof):
            raise PeerViolation("evidence has slices that the member has not committed to")
        try:
            check_frame(codec, each.data, num_values(leaf_at(group.num_values, leaf)))
        except CodecError as error:
            raise PeerViolation(f"evidence has slices that nobody can decode: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalCase:
    """A well-formed accusation of `member` at the step that `proof` commits. `finders` signed that its interval is
    wrong; the first of them is the drawn validator. `is_voted`: the certificate has the accused's own vote for the
    outcome."""

    proof: Proof
    member: Contribution
    leaves: tuple[int, ...]
    finders: tuple[str, ...]
    evidence: WrongInterval
    is_voted: bool

    @property
    def step(self) -> int:
        return self.proof.origin.step

    @property
    def reason(self) -> str:
        return f"its contribution to outer step {self.step} does not follow from its interval"

    @property
    def verdict(self) -> Verdict:
        """The verdict on the member, for findings that are enough."""
        return Verdict(peer_id=self.member.peer_id, step=self.step, kind=WRONG_INTERVAL, reason=self.reason)

    @property
    def counted(self) -> tuple[str, ...]:
        """The `finders` whose findings count: those that decide."""
        deciding = self.proof.origin.deciding
        return tuple(peer for peer in self.finders if peer in deciding)

    def is_enough(self, me: str) -> bool:
        """Return whether the findings convict, for member `me`: more than a third of the deciding members', at least
        two."""
        deciding = self.proof.origin.deciding
        is_alone = len({*deciding} - {self.member.peer_id}) < 2
        return len(self.counted) >= enough_for_one_honest(len(deciding)) or (is_alone and me in self.finders)

    def with_findings_of(self, other: IntervalCase) -> IntervalCase:
        """Add the findings of `other`, of the same outcome, by members without a finding here. The first finding of
        each member counts, so that a second one does not make the evidence invalid."""
        new = [index for index, peer in enumerate(other.finders) if peer not in self.finders]
        findings = (*self.evidence.findings, *(other.evidence.findings[index] for index in new))
        return replace(
            self,
            finders=(*self.finders, *(other.finders[index] for index in new)),
            evidence=replace(self.evidence, findings=findings),
            is_voted=self.is_voted or other.is_voted,
        )

    def compare(self, delta_N: Tensor, config: RunConfig) -> Likeness:
        """Compare what the member committed to with the recomputed `delta_N`. Blocks."""
        codec, most = get_codec(config.codec), config.validation_tolerance
        return likeness(self.proof.origin, codec, self.leaves, self.evidence.slices, delta_N, most)


def accused_of_interval(body: bytes, signatures: RunSignatures) -> tuple[str, int]:
    """Return the accused and the step. Raises PeerViolation or IntegrityError."""
    evidence = WrongInterval.from_bytes(body)
    if not evidence.findings:
        raise PeerViolation("evidence has no finding")
    _, finding = signatures.read(IntervalFinding, evidence.findings[0], issued_at(evidence.findings[0]))
    return finding.peer, finding.step


def read_case(body: bytes, signatures: RunSignatures, config: RunConfig) -> IntervalCase:
    """Return the accusation in `body`. Blocks for milliseconds. Raises PeerViolation or IntegrityError unless it is
    complete. The findings may still be too few, see `IntervalCase.is_enough`."""
    evidence = WrongInterval.from_bytes(body)
    proof = _proof_of(evidence.certificate, signatures)
    origin = proof.origin
    member = next((each for each in origin.contributors if each.peer_id == evidence.peer), None)
    validator = draw_validators(origin, proof.outcome, config.validation_rate).get(evidence.peer)
    if member is None or validator is None:
        raise PeerViolation("evidence is of an interval that the step's outcome does not draw")
    signatures.check_slices(member, member.peer_id, origin.step, origin.state_digest)
    leaves = draw_leaves(origin, proof.outcome, member.peer_id, validator)
    check_slices(origin, get_codec(config.codec), member, leaves, evidence.slices)
    finders = [_finder(data, proof, member.peer_id, signatures) for data in evidence.findings]
    if not finders or finders[0] != validator or len(set(finders)) < len(finders):
        raise PeerViolation("evidence does not begin with the finding of the drawn validator, or has one twice")
    return IntervalCase(
        proof=proof,
        member=member,
        leaves=leaves,
        finders=tuple(finders),
        evidence=evidence,
        is_voted=has_voted(evidence.certificate, member.peer_id, signatures),
    )


def has_voted(certificate: bytes, peer: str, signatures: RunSignatures) -> bool:
    """Return whether a certificate that has been checked has the vote of `peer`."""
    read = Certificate.from_bytes(certificate)
    peers = signatures.read_group(read.group, issued_at(read.group)).group.peer_ids
    return any(peers[vote.place] == peer for vote in read.votes)


def check_interval(body: bytes, signatures: RunSignatures, config: RunConfig) -> str:
    """Return in words what the findings in `body` prove to anyone without the run's history. Raises PeerViolation or
    IntegrityError if they prove nothing, and UnprovenToOutsiders if they may to others."""
    case = read_case(body, signatures, config)
    if not case.is_enough(signatures.identity.peer_id):
        num_members = len(case.proof.origin.deciding)
        raise UnprovenToOutsiders(f"evidence has findings of only {len(case.counted)} of {num_members} members")
    if not case.is_voted:
        raise UnprovenToOutsiders("evidence has no vote of the accused: its group may be made up")
    return case.reason


def _finder(data: bytes, proof: Proof, peer: str, signatures: RunSignatures) -> str:
    """Return the signer of a finding. Raises PeerViolation unless it is of this interval, by another of its members."""
    signer, finding = signatures.read(IntervalFinding, data, issued_at(data))
    origin = proof.origin
    about = (finding.step, finding.attempt, finding.origin_digest, finding.peer)
    if about != (origin.step, origin.attempt, proof.outcome.origin_digest, peer):
        raise PeerViolation("evidence has a finding of another interval")
    if signer not in origin.peer_ids or signer == peer:
        raise PeerViolation("evidence has a finding whose signer is not another member of the step")
    return signer


def _proof_of(data: bytes, signatures: RunSignatures) -> Proof:
    """Return what the certificate proves, however old it is. Raises PeerViolation or IntegrityError."""
    certificate = Certificate.from_bytes(data)
    if certificate.order:
        raise PeerViolation("evidence has a resume order for a certificate")
    return signatures.check_certificate(data, issued_at(certificate.group))


class IntervalAccusations:
    """The newest accusations in the run of `context`."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._cases = NewestItems[AccusationKey, IntervalCase](MAX_ACCUSATIONS)
        self._key_of = NewestItems[bytes, AccusationKey](MAX_ACCUSATIONS)  # what was checked, by its digest

    async def gather(self, evidence: Evidence, *, was_kept: bool) -> IntervalCase | None:
        """Return the accusation with all findings so far; None if it is of another history than this member's, or this
        member cannot tell. Raises PeerViolation or IntegrityError."""
        case = await self._read_case(evidence)
        if not was_kept and not self._is_of_this_run(case):
            return None
        key = (case.member.peer_id, case.step, case.proof.outcome)
        known = self._cases.get(key)
        if known is not None and known is not case:
            case = known.with_findings_of(case)
        self._cases[key] = case
        return case

    def _is_of_this_run(self, case: IntervalCase) -> bool:
        """Return whether the run has taken the step of an accusation, or its makers may have made it up (see
        `wrong_interval`).

        An accusation that contradicts this member's history is no violation of its sender, which may have joined later:
        a liar could make one of itself, for honest newcomers to pass on, so that nobody takes their evidence any more.
        """
        links = self._context.replica.history.since(case.step)
        outcomes = {link.outcome for link in links if link.outer_step == case.step and not link.is_order}
        return case.proof.outcome in outcomes if outcomes else case.is_voted

    async def _read_case(self, evidence: Evidence) -> IntervalCase:
        """Return the accusation in `evidence`, with earlier findings. Equal evidence is checked only once, since many
        members send it. Raises PeerViolation or IntegrityError."""
        digest, context = hashlib.sha256(evidence.body).digest(), self._context
        if (known := self._key_of.get(digest)) is not None and known in self._cases:
            return self._cases[known]
        signatures, config = context.signatures, context.replica.config
        case = await in_executor(context.executor, read_case, evidence.body, signatures, config)
        self._key_of[digest] = (case.member.peer_id, case.step, case.proof.outcome)
        return case
