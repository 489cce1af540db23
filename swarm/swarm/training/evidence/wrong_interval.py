"""Evidence that a member's contribution does not follow from its interval: who validates which intervals, how far a
contribution is from what its interval gives when it is computed once more, and what makes that count.

The draw is a pure function of the step's outcome, which holds the digests of all parts' results: nobody can choose it
alone, and nobody knew it when members committed to their contributions. All who have the step's certificate draw alike.
The work of members that bring followers is not drawn: it is the sum of several intervals.

Equal devices and software give equal bytes. Others round differently, and training multiplies that: over an interval of
the default run by a few percent in float32, and up to a sixth where one of both computes in bfloat16
(`tests/bench/test_bench_validation.py`). Contributions of other data, of noise, turned round, scaled or repeated are
further away than the run's `validation_tolerance`. Comparing blocks.

A validator's word alone convicts nobody. Members that receive it compute the interval once more, and sign what they
find. Evidence convicts once more than a third of the step's members that decide have signed, two at least, so that all
ban at about the same time; where only one of them is left to sign, for the one that has signed itself. Findings of
members on probation count for nothing, as keys cost nothing. Anyone who has the state that the step began from, and the
run's data, can do as they did.

A certificate does not prove that its members are the run's. So a member believes only the outcome that its own history
has of that step, and everybody else only a certificate with the accused's own commit vote: nobody can forge that, and
nobody votes in a group that is made up.

Only the validator that the step's outcome draws can accuse, by the leaves that the outcome draws: nobody can have
others compute again and again, or choose leaves in which devices differ most.

`IntervalAccusations` holds those of which this member has heard, with the findings that were gathered for each, until
they are enough. `Convictions` owns it and calls it for one piece of evidence at a time; checks are in the executor.

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
from swarm_protocol.proof_messages import WRONG_INTERVAL, Evidence, WrongInterval
from swarm_protocol.reduction_messages import AuditedSlice
from swarm_protocol.training_messages import Contribution, Group
from torch import Tensor

from swarm.newest_items import NewestItems
from swarm.threads import in_executor
from swarm.training.allreduce.committed_slices import is_leaf
from swarm.training.allreduce.parts import check_frame, leaf_at, num_leaves, num_values, part_leaves
from swarm.training.evidence.bans import Verdict
from swarm.training.run.run_config import RunConfig
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm.training.state.lease import LeaseStripe, SampleIds, lease_of
from swarm.training.state.run_context import RunContext

AccusationKey: TypeAlias = tuple[str, int, Outcome]
"""A member, the step, and the outcome that draws its interval: a made-up outcome is in nobody's way."""

MAX_ACCUSATIONS = 16
"""Accusations of intervals whose findings are gathered: each step draws few."""

_DIGEST_VALUES = 1 << 64


def draw_validators(origin: Group, outcome: Outcome, rate: float) -> Mapping[str, str]:
    """Return the validator of each member whose interval is validated, by member.

    Each contributor of `origin` is drawn with probability `rate`. A validator makes a part of the vector, so that it
    has the member's slices of it. It validates one interval only, and at most half of the members validate, so that
    some train in the next step.
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
    """`tier` says whether the leaves are equal, within the run's tolerance, or wrong. `distance` is the norm of their
    difference, relative to that of the recomputed ones; inf if these are zero and the others are not."""

    tier: Tier
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalStart:
    """Holds what an interval of outer step `step` follows from: the committed weights and the stripes of its leases."""

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
    not wrong. A slice that nobody can decode is wrong: the member has committed to it all the same."""
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
    """A well-formed accusation: `member` of the step that `proof` commits. `finders` have signed that they found its
    interval wrong; the first of them is the drawn validator. `is_voted` says whether the certificate has the accused's
    own vote for the outcome."""

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
        """Return what the findings prove where they are enough."""
        return Verdict(peer_id=self.member.peer_id, step=self.step, kind=WRONG_INTERVAL, reason=self.reason)

    @property
    def counted(self) -> tuple[str, ...]:
        """Those of `finders` whose findings count."""
        deciding = self.proof.origin.deciding
        return tuple(peer for peer in self.finders if peer in deciding)

    def is_enough(self, me: str) -> bool:
        """Return whether the findings convict, for `me`: those of more than a third of the members that decide, two at
        least."""
        deciding = self.proof.origin.deciding
        is_alone = len({*deciding} - {self.member.peer_id}) < 2
        return len(self.counted) >= max(2, len(deciding) // 3 + 1) or (is_alone and me in self.finders)

    def with_findings_of(self, other: IntervalCase) -> IntervalCase:
        """Return this accusation with the findings of `other`, of the same outcome, by members that have signed none
        here. The first finding of each member counts, so that nobody spoils the others' by signing a second one."""
        new = [index for index, peer in enumerate(other.finders) if peer not in self.finders]
        findings = (*self.evidence.findings, *(other.evidence.findings[index] for index in new))
        return replace(
            self,
            finders=(*self.finders, *(other.finders[index] for index in new)),
            evidence=replace(self.evidence, findings=findings),
            is_voted=self.is_voted or other.is_voted,
        )

    def compare(self, delta_N: Tensor, config: RunConfig) -> Likeness:
        """Compare what the member committed to with `delta_N`, which was recomputed. Blocks."""
        codec, most = get_codec(config.codec), config.validation_tolerance
        return likeness(self.proof.origin, codec, self.leaves, self.evidence.slices, delta_N, most)


def accused_of_interval(body: bytes, signatures: RunSignatures) -> tuple[str, int]:
    """Return whom the evidence is against, and the step. Raises PeerViolation or IntegrityError."""
    evidence = WrongInterval.from_bytes(body)
    if not evidence.findings:
        raise PeerViolation("evidence has no finding")
    _, finding = signatures.read_finding(evidence.findings[0], issued_at(evidence.findings[0]))
    return finding.peer, finding.step


def read_case(body: bytes, signatures: RunSignatures, config: RunConfig) -> IntervalCase:
    """Return the accusation in `body`. Blocks for milliseconds. Raises PeerViolation or IntegrityError unless it is
    complete: it may still not be enough, see `IntervalCase.is_enough`."""
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
    """Return in words what the findings in `body` prove to somebody who does not know the run's history. Raises
    PeerViolation or IntegrityError if that is nothing."""
    case = read_case(body, signatures, config)
    if not case.is_enough(signatures.identity.peer_id):
        num_members = len(case.proof.origin.deciding)
        raise PeerViolation(f"evidence has the word of {len(case.counted)} of {num_members} members only")
    if not case.is_voted:
        raise PeerViolation("evidence has no vote of the accused itself: its group can be made up")
    return case.reason


def _finder(data: bytes, proof: Proof, peer: str, signatures: RunSignatures) -> str:
    """Return the signer of a finding. Raises PeerViolation unless it is of this interval, by another of its members."""
    signer, finding = signatures.read_finding(data, issued_at(data))
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
        """Return the accusation with all findings that came so far; None if this member cannot tell whether it is of
        the run. Raises PeerViolation or IntegrityError."""
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
        """Return whether the step of an accusation is one that the run has taken, not one that its makers made up; see
        `wrong_interval`. Raises PeerViolation if this member knows that it is not."""
        links = self._context.replica.history.since(case.step)
        outcomes = {link.outcome for link in links if link.outer_step == case.step and not link.is_order}
        if not outcomes:
            return case.is_voted
        if case.proof.outcome not in outcomes:
            raise PeerViolation("evidence has another outcome of the step than this member's history")
        return True

    async def _read_case(self, evidence: Evidence) -> IntervalCase:
        """Return the accusation in `evidence`, with the findings that came before. Its finder sends it to all members,
        and each of these passes it on: it is checked once. Raises PeerViolation or IntegrityError."""
        digest, context = hashlib.sha256(evidence.body).digest(), self._context
        if (known := self._key_of.get(digest)) is not None and known in self._cases:
            return self._cases[known]
        signatures, config = context.signatures, context.replica.config
        case = await in_executor(context.executor, read_case, evidence.body, signatures, config)
        self._key_of[digest] = (case.member.peer_id, case.step, case.proof.outcome)
        return case
