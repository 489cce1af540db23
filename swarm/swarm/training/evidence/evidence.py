"""Checks what convicts a member of a run. Pure; anyone can do it who has the run's file and the evidence.

Evidence has a kind, and each kind a checker in `KINDS`; what is no evidence of any kind convicts nobody, such as that a
member sent nothing. To add a kind, write its message, its two functions in a module of its own, and its line here. A
wrong reduction, an equivocation and a bad slice prove themselves; a wrong interval counts by the signed findings of
members who computed it again. Signatures in evidence count however old they are: that somebody signed two things stays
true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarm_protocol.errors import PeerViolation
from swarm_protocol.proof_messages import BAD_SLICE, EQUIVOCATION, WRONG_INTERVAL, WRONG_REDUCTION, Evidence

from swarm.training.evidence.bans import Verdict
from swarm.training.evidence.equivocation import accused_of_equivocation, check_equivocation
from swarm.training.evidence.wrong_interval import accused_of_interval, check_interval
from swarm.training.evidence.wrong_reduction import accused_of, accused_of_bad_slice, check_bad_slice, check_reduction
from swarm.training.run.run_config import RunConfig
from swarm.training.state.certificate import RunSignatures


@dataclass(frozen=True, slots=True)
class EvidenceKind:
    """Says how evidence of one kind is read. `accused` returns whom it is against, and the step; `check` returns in
    words what it proves, and blocks. Both raise PeerViolation or IntegrityError for what proves nothing."""

    accused: Callable[[bytes, RunSignatures], tuple[str, int]]
    check: Callable[[bytes, RunSignatures, RunConfig], str]


KINDS: Mapping[str, EvidenceKind] = {
    WRONG_REDUCTION: EvidenceKind(accused_of, check_reduction),
    WRONG_INTERVAL: EvidenceKind(accused_of_interval, check_interval),
    EQUIVOCATION: EvidenceKind(accused_of_equivocation, check_equivocation),
    BAD_SLICE: EvidenceKind(accused_of_bad_slice, check_bad_slice),
}


def accused(evidence: Evidence, signatures: RunSignatures) -> tuple[str, int]:
    """Return whom `evidence` is against and the step of the lie that it shows, before it is checked; cheap. Raises
    PeerViolation or IntegrityError."""
    return _kind_of(evidence).accused(evidence.body, signatures)


def check(evidence: Evidence, signatures: RunSignatures, config: RunConfig) -> Verdict:
    """Return what `evidence` proves. `signatures` and `config` are of the run; nothing is signed here. Blocks.

    Raises PeerViolation or IntegrityError if it proves nothing: it is malformed, of another run or network, not signed,
    or consistent with an honest member.
    """
    kind = _kind_of(evidence)
    peer_id, step = kind.accused(evidence.body, signatures)
    reason = kind.check(evidence.body, signatures, config)
    return Verdict(peer_id=peer_id, step=step, kind=evidence.kind, reason=reason)


def _kind_of(evidence: Evidence) -> EvidenceKind:
    if evidence.kind not in KINDS:
        raise PeerViolation(f"evidence is of the kind {evidence.kind!r}, which this node does not know")
    return KINDS[evidence.kind]
