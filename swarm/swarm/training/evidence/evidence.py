"""Evidence against members of a run, and what it proves. `evidence_folder` keeps it on a disk.

Anyone with the run's file can check it. Each kind of evidence has a checker in `KINDS`. Nothing else convicts a member,
for example that it sent nothing. To add a kind, write its message, its two functions in a module of its own, and its
line here. A wrong reduction, an equivocation and a bad slice prove themselves; a wrong interval is proved by signed
findings of members that recomputed it. Signatures in evidence never expire: what somebody signed stays signed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import (
    BAD_SLICE,
    EQUIVOCATION,
    WRONG_INTERVAL,
    WRONG_REDUCTION,
    Evidence,
)

from swarm.evidence_folder import proving, read_file
from swarm.training.evidence.bans import Verdict
from swarm.training.evidence.equivocation import accused_of_equivocation, check_equivocation
from swarm.training.evidence.wrong_interval import accused_of_interval, check_interval
from swarm.training.evidence.wrong_reduction import accused_of, accused_of_bad_slice, check_bad_slice, check_reduction
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun, parse_signed_run
from swarm.training.state.certificate import RunSignatures


@dataclass(frozen=True, slots=True)
class EvidenceKind:
    """The functions for one kind of evidence. `accused` returns the accused and the step. `check` returns in words what
    the evidence proves, and blocks. Both raise PeerViolation or IntegrityError for evidence that proves nothing."""

    accused: Callable[[bytes, RunSignatures], tuple[str, int]]
    check: Callable[[bytes, RunSignatures, RunConfig], str]


KINDS: Mapping[str, EvidenceKind] = {
    WRONG_REDUCTION: EvidenceKind(accused_of, check_reduction),
    WRONG_INTERVAL: EvidenceKind(accused_of_interval, check_interval),
    EQUIVOCATION: EvidenceKind(accused_of_equivocation, check_equivocation),
    BAD_SLICE: EvidenceKind(accused_of_bad_slice, check_bad_slice),
}


def accused(evidence: Evidence, signatures: RunSignatures) -> tuple[str, int]:
    """Return the accused and the step of the lie, without a full check; cheap. Raises PeerViolation or
    IntegrityError."""
    return _kind_of(evidence).accused(evidence.body, signatures)


def check(evidence: Evidence, signatures: RunSignatures, config: RunConfig) -> Verdict:
    """Return what `evidence` proves in the run of `signatures` and `config`. Signs nothing. Blocks.

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


def check_file(path: Path) -> tuple[SignedRun, Verdict]:
    """Return the run of the evidence in `path`, and what it proves. Needs only the file. Blocks.

    Raises ConfigError, and IntegrityError if the file holds no evidence, or proves nothing.
    """
    run, signatures, data = open_file(path)
    with proving(path):
        return run, check(Evidence.from_bytes(data), signatures, run.config)


def open_file(path: Path) -> tuple[SignedRun, RunSignatures, bytes]:
    """Return the run of an evidence file, a checker of its signatures, and the evidence. Raises ConfigError or
    IntegrityError for a file that is unreadable or malformed, or of a kind that this node does not know."""
    file = read_file(path)
    run = parse_signed_run(file.run, f"the run in {path}")
    try:
        kind = Evidence.from_bytes(file.evidence).kind
    except SwarmError as error:
        raise IntegrityError(f"{path} holds no evidence: {error.message}", remedy="get the file again") from error
    if kind not in KINDS:
        raise ConfigError(
            f"{path} holds evidence of the kind {kind!r}, which this node does not know",
            remedy="check it with a newer swarm-node",
        )
    return run, RunSignatures.of_run(run, Identity.generate(), file.network_id), file.evidence
