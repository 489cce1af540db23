"""What `swarm-node evidence` says of a file about a server's wrong answer: only the model's files can judge it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation, SwarmError
from swarm_protocol.proof_messages import WRONG_ANSWER, Evidence, EvidenceFile
from swarm_protocol.served_evidence_messages import ServedEvidence

from swarm_node import diagnostics, interrupts
from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import UsageError


def judge(path: Path, file: EvidenceFile, model: Path | None, emitter: Emitter) -> None:
    """Print what the file proves, by the files of the published model in `model`.

    Raises UsageError if it cannot be judged: without the model, or with another one; IntegrityError if it proves
    nothing.
    """
    from swarm.serving.checking.wrong_answer import signer_of  # noqa: PLC0415

    evidence = _served(path, file)
    with _proving(path):
        peer_id, stated = signer_of(evidence, file.network_id)
    if model is None:
        raise UsageError(
            f"{path} is of an answer of {peer_id} with {stated.model}, which only the model's files can judge",
            remedy="add --model DIR: the directory of the published model",
        )
    from swarm.serving.server.answer_replay import replay_answer  # noqa: PLC0415 - torch, which takes seconds

    diagnostics.quieten_libraries()
    interrupts.raise_in_command()
    try:
        verdict = replay_answer(evidence, file.network_id, model)
    except PeerViolation as error:
        raise IntegrityError(f"{path} proves nothing: {error.message}") from error
    except (ConfigError, IntegrityError) as error:
        raise UsageError(error.message, remedy=error.remedy) from error
    emitter.emit(
        "served_evidence",
        path=str(path),
        peer_id=verdict.peer_id,
        model=verdict.model,
        start=verdict.start,
        end=verdict.end,
        is_proven=True,
        reason=f"lied: {verdict.reason}",
    )


def tell(path: Path, file: EvidenceFile, emitter: Emitter) -> None:
    """Print what the file is about, unjudged. Raises UsageError or IntegrityError for one that is of no answer."""
    from swarm.serving.checking.wrong_answer import signer_of  # noqa: PLC0415

    with _proving(path):
        peer_id, stated = signer_of(_served(path, file), file.network_id)
    emitter.emit(
        "served_evidence",
        path=str(path),
        peer_id=peer_id,
        model=stated.model,
        start=stated.start,
        end=stated.end,
        is_proven=False,
        reason="was named by this node's spot checks; evidence verify --model DIR judges it",
    )


def _served(path: Path, file: EvidenceFile) -> ServedEvidence:
    try:
        evidence = Evidence.from_bytes(file.evidence)
        if evidence.kind != WRONG_ANSWER:
            raise UsageError(
                f"{path} holds evidence of the kind {evidence.kind!r} without a run",
                remedy="check it with a newer swarm-node, or get the file again",
            )
        return ServedEvidence.from_bytes(evidence.body)
    except PeerViolation as error:
        raise UsageError(f"{path} holds no evidence: {error.message}", remedy="get the file again") from error


@contextmanager
def _proving(path: Path) -> Iterator[None]:
    """Raise IntegrityError, which names the file, for what nobody has signed."""
    try:
        yield
    except SwarmError as error:
        raise IntegrityError(f"{path} proves nothing: {error.message}") from error
