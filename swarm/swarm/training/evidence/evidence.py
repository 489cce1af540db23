"""Evidence against members of a run: what it proves, and how it is kept on a disk.

Anyone with the run's file can check it. Each kind of evidence has a checker in `KINDS`. Nothing else convicts a member,
for example that it sent nothing. To add a kind, write its message, its two functions in a module of its own, and its
line here. A wrong reduction, an equivocation and a bad slice prove themselves; a wrong interval is proved by signed
findings of members that recomputed it. Signatures in evidence never expire: what somebody signed stays signed.

A folder has one file for each banned peer of one run. Each file contains all that a check needs. Files are written
completely or not at all; the owner of `Bans` decides which are kept. A file that cannot be read is a warning, since
other members show the same evidence again. Blocks; a folder belongs to one run and one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import (
    BAD_SLICE,
    EQUIVOCATION,
    WRONG_INTERVAL,
    WRONG_REDUCTION,
    Evidence,
    EvidenceFile,
)
from swarm_protocol.wire import MESSAGE_VERSION

from swarm.training.evidence.bans import Verdict
from swarm.training.evidence.equivocation import accused_of_equivocation, check_equivocation
from swarm.training.evidence.wrong_interval import accused_of_interval, check_interval
from swarm.training.evidence.wrong_reduction import accused_of, accused_of_bad_slice, check_bad_slice, check_reduction
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun, parse_signed_run
from swarm.training.state.certificate import RunSignatures
from swarm.whole_files import write_whole

logger = logging.getLogger(__name__)

SUFFIX = ".evidence"


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


class EvidenceStore(Protocol):
    """Keeps the evidence of one run beyond the end of the process. All methods block, and none raises: a member goes on
    training if its disk fails."""

    def read(self) -> list[bytes]:
        """Return all stored evidence, in any order."""

    def keep(self, peer_id: str, evidence: bytes) -> None:
        """Store the evidence against `peer_id`, replacing earlier evidence against it."""

    def forget(self, peer_id: str) -> None:
        """Drop the evidence against `peer_id`, if there is any."""


class EvidenceFolder:
    """Implements EvidenceStore in `folder`, for `run` in the network `network_id`."""

    def __init__(self, folder: Path, run: SignedRun, network_id: str) -> None:
        self._folder = folder
        self._run = run
        self._network_id = network_id

    def read(self) -> list[bytes]:
        found = []
        for path in files_in(self._folder):
            try:
                kept = read_file(path)
            except SwarmError as error:
                logger.warning("stored evidence is not used: %s", error)
                continue
            found.append(kept.evidence)
        return found

    def keep(self, peer_id: str, evidence: bytes) -> None:
        file = EvidenceFile(network_id=self._network_id, run=self._run.text.encode(), evidence=evidence)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path_of(peer_id), (file.to_bytes(),), is_flushed=True)
        except OSError as error:
            logger.warning("evidence against %s does not outlive a restart: %s", peer_id, error)

    def forget(self, peer_id: str) -> None:
        with suppress(OSError):
            self._path_of(peer_id).unlink()

    def _path_of(self, peer_id: str) -> Path:
        return self._folder / f"{peer_id}{SUFFIX}"


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the evidence files in `folder`, at most MAX_BANS, in the order of their names."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    except OSError:
        return
    yield from paths[: limits.MAX_BANS]


def read_file(path: Path) -> EvidenceFile:
    """Read an evidence file, and check only its form. Raises ConfigError, or IntegrityError if it is not an evidence
    file."""
    most = EvidenceFile.MAX_BYTES
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {(error.strerror or str(error)).lower()}", remedy="name an evidence file"
        ) from error
    try:
        return EvidenceFile.from_bytes(data)
    except SwarmError as error:
        # the first byte of other files is read as another version of the protocol
        is_other = not data or data[0] != MESSAGE_VERSION
        why = "" if is_other else f": {error.message}"
        raise IntegrityError(
            f"{path} is not an evidence file{why}", remedy="name a file as a home keeps it, or get the file again"
        ) from error


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


@contextmanager
def proving(path: Path) -> Iterator[None]:
    """Translate a failed check to IntegrityError, which names the file."""
    try:
        yield
    except SwarmError as error:
        raise IntegrityError(f"{path} proves nothing: {error.message}") from error
