"""Compares a server's commitment for a span with the client's data, and makes evidence that others can check.

Pure, and without torch.
"""

from __future__ import annotations

from swarm_protocol.envelope import issued_at, unseal
from swarm_protocol.errors import PeerViolation, SwarmError
from swarm_protocol.rows import TOKENS, row_bytes
from swarm_protocol.served_evidence_messages import (
    COMMITMENT_PURPOSE,
    AnswerCommitment,
    PositionDigests,
    ServedEvidence,
    ShownDraw,
)

from swarm.serving.checking.finished_answer import AnsweredSpan, Draw, FinishedAnswer, Reason
from swarm.serving.model.shape import ModelShape


def commitment_complaint(  # noqa: PLR0911 a fault each
    answer: FinishedAnswer, span: AnsweredSpan, network_id: str, now: float
) -> tuple[Reason, str] | None:
    """Return what is wrong with the commitment of a span's server: the reason and a sentence. None if it is right."""
    if not span.signed:
        return "withheld", "the server did not sign what it had computed"
    if not span.draws and len(span.outputs) < (span.num_rows - span.outputs_from) * span_row_bytes(answer, span.end):
        return "withheld", "the server did not give all of its rows"
    try:
        envelope = unseal(span.signed, purpose=COMMITMENT_PURPOSE, network_id=network_id, now=now)
        stated = AnswerCommitment.from_bytes(envelope.payload)
    except SwarmError as error:
        return "withheld", f"what the server signed cannot be used: {error.message}"
    model = answer.model
    about = (envelope.peer_id, stated.sequence_id, stated.model, stated.revision, stated.start, stated.end)
    if about != (span.peer_id, span.sequence_id, model.name, model.revision, span.start, span.end):
        return "withheld", "the server signed something about another sequence"
    if stated.inputs_to < span.num_rows or stated.outputs_from > _outputs_from(span):
        return "withheld", "the server signed only a part of what it had computed"
    if stated.outputs_from < _outputs_from(span):
        # the previous server pushed it a row whose output the client had from a server that it replaced
        return "inputs", "the server signed outputs that the client did not ask it for"
    if stated.inputs_digest != _inputs_digest(answer, span, stated.inputs_from):
        return "inputs", "the server signed other inputs than the client knows"
    if stated.outputs_digest != _outputs_digest(answer, span):
        return "commitment", "the server signed other outputs than it gave"
    return None


def _outputs_from(span: AnsweredSpan) -> int:
    return span.draws[0].position if span.draws else span.outputs_from


def _inputs_digest(answer: FinishedAnswer, span: AnsweredSpan, start: int) -> bytes:
    each = span_row_bytes(answer, span.start)
    digests = PositionDigests(start)
    digests.add_rows(start, memoryview(span.inputs)[start * each : span.num_rows * each], each)
    return digests.digest(span.num_rows)


def _outputs_digest(answer: FinishedAnswer, span: AnsweredSpan) -> bytes:
    digests = PositionDigests()
    if not span.draws:
        digests.add_rows(span.outputs_from, span.outputs, span_row_bytes(answer, span.end))
        return digests.digest(span.num_rows)
    for each in span.draws:
        digests.add_draw(each.position, each.draw, each.token)
    return digests.digest(span.draws[-1].position + 1)


def span_row_bytes(answer: FinishedAnswer, block: int) -> int:
    """Return the size in bytes of an input row of `block`, which is an output row of the block before it."""
    return row_bytes(answer.codec, answer.model.hidden_size) if block else row_bytes(TOKENS, 0)


def evidence_of(answer: FinishedAnswer, span: AnsweredSpan, network_id: str) -> bytes:
    """Return the evidence against the server of `span`. Empty if it would be too large, or if the server did not sign
    all inputs, so that others could not recompute its outputs."""
    _, stated = signed_by(span.signed, network_id)
    if stated.inputs_from:
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


def signed_by(signed: bytes, network_id: str) -> tuple[str, AnswerCommitment]:
    """Return the signer and the commitment in an envelope of any age. Raises PeerViolation or IntegrityError."""
    envelope = unseal(signed, purpose=COMMITMENT_PURPOSE, network_id=network_id, now=issued_at(signed))
    return envelope.peer_id, AnswerCommitment.from_bytes(envelope.payload)


def answer_of(evidence: ServedEvidence, network_id: str, model: ModelShape) -> FinishedAnswer:
    """Return the answer of `model` in the evidence, which has one span. Raises PeerViolation or IntegrityError unless
    its server signed exactly these inputs and outputs. Whether the outputs follow from the inputs needs a recomputation
    with the model's files: `swarm.serving.server.answer_replay`."""
    peer_id, stated = signed_by(evidence.commitment, network_id)
    if (stated.model, stated.revision) != (model.name, model.revision) or stated.end > model.num_blocks:
        raise PeerViolation("evidence is of another model or revision", peer_id=peer_id)
    if stated.inputs_from or stated.outputs_from >= stated.inputs_to:
        raise PeerViolation("evidence does not show all inputs that its server took", peer_id=peer_id)
    is_last = stated.end == model.num_blocks
    each = row_bytes(evidence.codec, model.hidden_size) if stated.start else row_bytes(TOKENS, 0)
    num_rows = len(evidence.inputs) // each
    draws = _draws(evidence)
    if len(evidence.inputs) % each or not num_rows or is_last != bool(draws):
        raise PeerViolation("evidence does not have the rows that its server signed", peer_id=peer_id)
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
    return answer


def _draws(evidence: ServedEvidence) -> tuple[Draw, ...]:
    try:
        return tuple(Draw(position=each.position, draw=each.draw, token=each.token) for each in evidence.draws)
    except ValueError as error:
        raise PeerViolation(f"evidence has an impossible draw: {error}") from error
