"""A span of an answer that other servers have found wrong, as evidence that outlives the answer.

A client keeps what the server signed with what that is of. `answer_of` reads it again, and checks all that needs no
weights: who signed it, and that it is of these inputs and outputs. That they do not follow from each other shows only
who computes them with the model's files: `swarm.serving.server.answer_replay`.

Pure, and without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.envelope import issued_at, unseal
from swarm_protocol.errors import PeerViolation
from swarm_protocol.rows import TOKENS, row_bytes
from swarm_protocol.served_evidence_messages import COMMITMENT_PURPOSE, AnswerCommitment, ServedEvidence, ShownDraw

from swarm.serving.checking.finished_answer import AnsweredSpan, Draw, FinishedAnswer
from swarm.serving.checking.span_commitment import commitment_complaint
from swarm.serving.model.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """Holds what evidence shows: the one span in `answer`, and what its server has `stated` of it."""

    answer: FinishedAnswer
    span: AnsweredSpan
    stated: AnswerCommitment


def evidence_of(answer: FinishedAnswer, span: AnsweredSpan, network_id: str) -> bytes:
    """Return the evidence against the server of `span`; no bytes if it would be too large, or if the server did not
    sign all of its inputs, so that others could not tell what its outputs must be."""
    if stated_in(span.signed, network_id).inputs_from:
        return b""
    try:
        return ServedEvidence(
            commitment=span.signed,
            codec=answer.codec,
            inputs=bytes(span.inputs),
            outputs=b"" if span.draws else bytes(span.outputs),
            draws=tuple(ShownDraw.of(each.position, each.draw, each.token) for each in span.draws),
        ).to_bytes()
    except ValueError:
        return b""


def stated_in(signed: bytes, network_id: str) -> AnswerCommitment:
    """Return the commitment in an envelope, however old it is. Raises PeerViolation or IntegrityError."""
    envelope = unseal(signed, purpose=COMMITMENT_PURPOSE, network_id=network_id, now=issued_at(signed))
    return AnswerCommitment.from_bytes(envelope.payload)


def signer_of(evidence: ServedEvidence, network_id: str) -> tuple[str, AnswerCommitment]:
    """Return the server that the evidence is against, and what it stated. Raises PeerViolation or IntegrityError."""
    signed = evidence.commitment
    envelope = unseal(signed, purpose=COMMITMENT_PURPOSE, network_id=network_id, now=issued_at(signed))
    return envelope.peer_id, AnswerCommitment.from_bytes(envelope.payload)


def answer_of(evidence: ServedEvidence, network_id: str, model: ModelShape) -> ShownAnswer:
    """Return what the evidence shows of `model`. Raises PeerViolation or IntegrityError unless its server has signed
    just these inputs and outputs, and all of them."""
    peer_id, stated = signer_of(evidence, network_id)
    if (stated.model, stated.revision) != (model.name, model.revision) or stated.end > model.num_blocks:
        raise PeerViolation("evidence is of another model or revision", peer_id=peer_id)
    if stated.inputs_from or stated.outputs_from >= stated.inputs_to:
        raise PeerViolation("evidence does not show all inputs that its server took", peer_id=peer_id)
    is_last = stated.end == model.num_blocks
    each = row_bytes(evidence.codec, model.hidden_size) if stated.start else row_bytes(TOKENS, 0)
    num_rows = len(evidence.inputs) // each
    draws = _draws(evidence)
    if len(evidence.inputs) % each or not num_rows or is_last != bool(draws):
        raise PeerViolation("evidence has not the rows that its server signed", peer_id=peer_id)
    if [draw.position for draw in draws] != list(range(num_rows - len(draws), num_rows)):
        raise PeerViolation("evidence has draws that do not follow its inputs", peer_id=peer_id)
    span = AnsweredSpan(
        peer_id=peer_id,
        previous_peer_id="",
        start=stated.start,
        end=stated.end,
        sequence_id=stated.sequence_id,
        inputs=evidence.inputs,
        num_rows=num_rows,
        outputs=evidence.outputs,
        outputs_from=draws[0].position if draws else stated.outputs_from,
        draws=draws,
        signed=evidence.commitment,
    )
    answer = FinishedAnswer(model=model, codec=evidence.codec, has_plain_draws=False, was_replayed=False, spans=(span,))
    complaint = commitment_complaint(answer, span, network_id, issued_at(evidence.commitment))
    if complaint:
        raise PeerViolation(f"evidence proves nothing: {complaint[1]}", peer_id=peer_id)
    return ShownAnswer(answer=answer, span=span, stated=stated)


def _draws(evidence: ServedEvidence) -> tuple[Draw, ...]:
    try:
        return tuple(Draw(position=each.position, draw=each.draw, token=each.token) for each in evidence.draws)
    except ValueError as error:
        raise PeerViolation(f"evidence has a draw that nobody can have asked for: {error}") from error
