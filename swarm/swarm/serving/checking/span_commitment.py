"""Compares what a server signed of a span with what the client has of it. Pure, and without torch."""

from __future__ import annotations

from swarm_protocol.envelope import unseal
from swarm_protocol.errors import SwarmError
from swarm_protocol.rows import TOKENS, row_bytes
from swarm_protocol.served_evidence_messages import COMMITMENT_PURPOSE, AnswerCommitment, PositionDigests

from swarm.serving.checking.finished_answer import AnsweredSpan, FinishedAnswer, Reason


def commitment_complaint(  # noqa: PLR0911 a fault each
    answer: FinishedAnswer, span: AnsweredSpan, network_id: str, now: float
) -> tuple[Reason, str] | None:
    """Return what is wrong with the commitment of a span's server, or None."""
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
    if stated.inputs_to < span.num_rows or stated.outputs_from != _outputs_from(span):
        return "withheld", "the server signed only a part of what it had computed"
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
    """Return the size of a row at the beginning of `block`, or at the end of the block before it."""
    return row_bytes(answer.codec, answer.model.hidden_size) if block else row_bytes(TOKENS, 0)
