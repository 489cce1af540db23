"""Checks one span of an answer: its server's commitment against the client's rows, and the rows against other servers.

A mismatch alone does not prove who lied: it may be the checking server. A third server decides between the two. Without
a third, or if a server committed to other inputs than the previous server gave the client, the two are in a dispute. A
server does not commit to rows that were in its cache before the answer began, so a mismatch after such rows is a
dispute, too.

Another server recomputes blocks of the answer as one pass over the whole sequence (`serving.forward`). It is told
neither the expected result nor that this is a check. Its answer may take RECOMPUTE_S, and as many bytes as the rows or
logits asked for.

Runs on the client's event loop, without torch; heavy comparisons run in a thread.

Shapes: T positions, H hidden size, N draws, K largest logits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.rows import TOKENS, row_bytes
from swarm_protocol.serving_messages import FORWARD_METHOD, Compute, TensorPiece

from swarm.network.interface import EndOfStream, Network, Stream
from swarm.serving.checking.comparison import (
    TOLERANCES,
    Difference,
    Floats,
    LargestLogits,
    compare_draws,
    compare_rows,
    decoded_rows,
)
from swarm.serving.checking.finished_answer import AnsweredSpan, CheckReport, FinishedAnswer, Outcomes, Reason, Result
from swarm.serving.checking.span_commitment import commitment_complaint, evidence_of, signed_by, span_row_bytes
from swarm.serving.model.shape import ModelShape
from swarm.trust.reputation import Outcome

logger = logging.getLogger(__name__)

MAX_CANDIDATES_ASKED = 3
"""Maximum servers that are asked for one recomputation. If all refuse, the span stays unchecked."""

RECOMPUTE_S = 120.0
"""A check is not urgent, and a server may serve other requests first."""

NUM_TOP = 64
"""Logits that are asked for per draw. The sum over all logits bounds the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanInputs:
    """The inputs of blocks `[start, end)`: token ids for block 0, else hidden states [T, H] as fp32.

    `num_draws` tokens were drawn after the last positions, at `temperature`; 0 for spans without the last block.
    """

    start: int
    end: int
    rows: bytes
    num_rows: int
    num_draws: int = 0
    temperature: float = 0.0


Recompute: TypeAlias = Callable[[str, SpanInputs], Awaitable[Floats]]
"""Have a peer compute the outputs of inputs. Raises SwarmError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """The context that a client gives a check: `network_id` and time for signatures, the span's `dtype`, and the
    `candidates`, other servers of the blocks, in the order in which `recompute` asks them."""

    network_id: str
    now: float
    dtype: str
    candidates: tuple[str, ...]
    recompute: Recompute


async def check_span(  # noqa: PLR0911 a result each
    answer: FinishedAnswer, span: AnsweredSpan, context: CheckContext
) -> CheckReport:
    """Check one span. Raises only CancelledError."""
    is_last = span.end == answer.model.num_blocks
    if span.outputs_from >= span.num_rows or (is_last and not span.draws):
        return CheckReport.unchecked(span, "nothing")
    if len(span.inputs) < span.num_rows * span_row_bytes(answer, span.start):
        return CheckReport.unchecked(span, "no inputs")
    if span.was_cut_off and not span.signed:
        return CheckReport.unchecked(span, "cut off")
    complaint = await asyncio.to_thread(commitment_complaint, answer, span, context.network_id, context.now)
    if complaint and answer.was_replayed:
        # no server need be at fault: rows that a new server computes again are rounded otherwise, servers after it run
        # drafts again with them, and a closed sequence runs no more rows
        return CheckReport.unchecked(span, "replayed")
    if complaint:
        return _unproved(span, *complaint)
    if span.is_taken_over:
        # the cache that it took over is another server's work, and there is nothing to check it against
        return CheckReport.unchecked(span, "taken over")
    if context.dtype not in TOLERANCES:
        return CheckReport.unchecked(span, "no dtype")
    if not context.candidates:
        return CheckReport.unchecked(span, "alone")
    return await _Comparison(answer, span, context).run()


class _Comparison:
    """Compares one span's outputs with those of other servers."""

    def __init__(self, answer: FinishedAnswer, span: AnsweredSpan, context: CheckContext) -> None:
        self._answer = answer
        self._span = span
        self._context = context
        self._left = list(context.candidates)
        tolerance = TOLERANCES[context.dtype].after(span.end - span.start)
        self._tolerance = tolerance.with_codec(answer.codec)

    async def run(self) -> CheckReport:
        span = self._span
        inputs = await asyncio.to_thread(self._inputs)
        first = await self._computed(inputs)
        if first is None:
            return CheckReport.unchecked(span, "busy")
        checker, expected = first
        difference = await asyncio.to_thread(self._difference, expected)
        if not difference.is_mismatch:
            return _report(span, "passed", outcomes=((span.peer_id, "passed"),))
        what: Reason = "draws" if span.draws else "rows"
        detail = f"{difference.what} differs by {difference.share:.1f} times the tolerance"
        second = await self._computed(inputs)
        if second is None:
            return _disputed(span, what, detail, (span.peer_id, checker))
        return await asyncio.to_thread(self._decided, what, detail, (checker, expected), second)

    def _decided(self, what: Reason, detail: str, first: tuple[str, Floats], second: tuple[str, Floats]) -> CheckReport:
        """Decide by the third server's outputs."""
        span, (checker, expected), (third, other) = self._span, first, second
        agree, third_confirms = self._agree(expected, other), not self._difference(other).is_mismatch
        if third_confirms and agree:
            # the third server is between the two, so rounding alone may explain the difference
            return _disputed(span, what, f"{detail} at {checker}, but not at {third}", (span.peer_id, checker))
        if third_confirms:
            # the span's server and the third agree: the first checker computed something else
            outcomes: Outcomes = ((span.peer_id, "passed"), (checker, "failed"))
            return _report(span, "passed", what, f"{detail} at {checker} alone", named=checker, outcomes=outcomes)
        if not agree:
            return _disputed(span, what, f"{detail}, and no two servers agree", (span.peer_id, checker, third))
        if self._is_from_cache():
            return _disputed(span, what, f"{detail}, after inputs from a cache", (span.peer_id,))
        outcomes = ((span.peer_id, "failed"), (checker, "passed"), (third, "passed"))
        evidence = evidence_of(self._answer, span, self._context.network_id)
        return _report(span, "failed", what, detail, named=span.peer_id, outcomes=outcomes, evidence=evidence)

    def _is_from_cache(self) -> bool:
        """Return whether the server may legitimately have begun with cached rows that it did not commit to.

        Block 0 has no such rows, since its inputs are tokens. A server that claims a cache and began elsewhere has left
        out inputs from its commitment.
        """
        if not self._span.start:
            return False
        _, stated = signed_by(self._span.signed, self._context.network_id)
        return stated.inputs_from == self._span.begins_at > 0

    async def _computed(self, inputs: SpanInputs) -> tuple[str, Floats] | None:
        """Have the next willing candidate compute the span; None if MAX_CANDIDATES_ASKED refuse."""
        for _ in range(min(MAX_CANDIDATES_ASKED, len(self._left))):
            peer_id = self._left.pop(0)
            try:
                return peer_id, await self._context.recompute(peer_id, inputs)
            except SwarmError as error:
                logger.info("%s did not compute a spot check: %s", peer_id, error)
        return None

    def _inputs(self) -> SpanInputs:
        answer, span = self._answer, self._span
        rows = span.inputs
        if span.start and answer.codec != "raw":
            rows = fp32_bytes(decoded_rows(rows, answer.codec, answer.model.hidden_size))
        return SpanInputs(
            start=span.start,
            end=span.end,
            rows=rows,
            num_rows=span.num_rows,
            num_draws=len(span.draws),
            temperature=span.draws[-1].draw.temperature if span.draws else 0.0,
        )

    def _difference(self, expected: Floats) -> Difference:
        span, answer = self._span, self._answer
        if span.draws:
            return compare_draws(
                span.draws, largest_logits(expected), self._tolerance, has_plain_draws=answer.has_plain_draws
            )
        given = decoded_rows(span.outputs, answer.codec, answer.model.hidden_size)
        return compare_rows(given, expected[span.outputs_from :], self._tolerance)

    def _agree(self, first: Floats, second: Floats) -> bool:
        """Return whether two recomputations differ only by rounding."""
        if not self._span.draws:
            return not compare_rows(first, second, self._tolerance).is_mismatch
        num_top = first.shape[1] // 2
        errors = [
            abs(float(a[:num_top].mean() - b[:num_top].mean())) / max(1e-30, float(abs(b[:num_top]).max()))
            for a, b in zip(first, second, strict=True)
        ]
        return sum(errors) / len(errors) <= self._tolerance.fingerprint


def _unproved(span: AnsweredSpan, reason: Reason, detail: str) -> CheckReport:
    """Report a commitment that is missing or contradicts the client's data."""
    if reason == "commitment":
        # the client knows what it received, and from whom
        return _report(span, "failed", reason, detail, named=span.peer_id, outcomes=((span.peer_id, "failed"),))
    between = (span.peer_id, span.previous_peer_id) if reason == "inputs" and span.previous_peer_id else (span.peer_id,)
    return _disputed(span, reason, detail, between)


def _disputed(span: AnsweredSpan, reason: Reason, detail: str, peers: Collection[str]) -> CheckReport:
    return _report(
        span, "disputed", reason, detail, outcomes=tuple((peer, "disputed") for peer in dict.fromkeys(peers))
    )


def _report(
    span: AnsweredSpan,
    result: Result,
    reason: Reason = "",
    detail: str = "",
    *,
    named: str = "",
    outcomes: tuple[tuple[str, Outcome], ...] = (),
    evidence: bytes = b"",
) -> CheckReport:
    return CheckReport(
        peer_id=span.peer_id,
        start=span.start,
        end=span.end,
        result=result,
        reason=reason,
        detail=detail,
        named=named,
        outcomes=outcomes,
        evidence=evidence,
    )


async def recompute(network: Network, model: ModelShape, peer_id: str, inputs: SpanInputs) -> Floats:
    """Return the outputs [T, H], or the largest logits [N, 2 K + 1] as `Compute` defines them.

    Raises PeerError, also the server's own error, and PeerViolation for numbers that are not finite.
    """
    asked = Compute(
        revision=model.revision,
        start=inputs.start,
        end=inputs.end,
        num_sequences=1,
        num_positions=inputs.num_rows,
        of_tokens=inputs.start == 0,
        head=inputs.num_draws > 0,
        codec="raw",
        deadline_s=RECOMPUTE_S,
        num_top=NUM_TOP if inputs.num_draws else 0,
        num_last=inputs.num_draws,
        temperature=inputs.temperature,
    )
    num_columns = model.vocab_size if inputs.num_draws else model.hidden_size
    _, num_rows, num_columns = asked.answer_shape(num_columns, has_logits=inputs.num_draws > 0)
    try:
        async with (
            asyncio.timeout(RECOMPUTE_S),
            network.stream(peer_id, f"{FORWARD_METHOD}/{model.name}", timeout_s=RECOMPUTE_S) as stream,
        ):
            await stream.send(asked.to_bytes())
            for piece in _pieces(inputs, model.hidden_size):
                await stream.send(piece.to_bytes())
            return await _received(stream, num_rows, num_columns)
    except TimeoutError:
        raise PeerTimeout("the server did not compute a check in time", peer_id=peer_id) from None
    except EndOfStream:
        raise PeerUnreachable("the server ended a check", peer_id=peer_id) from None


def largest_logits(answer_NC: Floats) -> list[LargestLogits]:
    """Parse the rows of largest logits."""
    num_top = answer_NC.shape[1] // 2
    return [
        LargestLogits(
            values_K=row[:num_top],
            ids_K=np.clip(row[num_top : 2 * num_top], 0, limits.MAX_VOCAB).astype(np.int64),
            log_sum=float(row[2 * num_top]),
        )
        for row in answer_NC
    ]


def fp32_bytes(rows_TH: Floats) -> bytes:
    """Encode hidden states for `SpanInputs`."""
    return rows_TH.astype("<f4").tobytes()


def _pieces(inputs: SpanInputs, hidden_size: int) -> Iterator[TensorPiece]:
    codec, num_columns = (TOKENS, 0) if inputs.start == 0 else ("raw", hidden_size)
    each, view = row_bytes(codec, num_columns), memoryview(inputs.rows)
    return TensorPiece.cut(codec, inputs.num_rows, num_columns, lambda start, end: view[start * each : end * each])


async def _received(stream: Stream, num_rows: int, num_columns: int) -> Floats:
    parts: list[NDArray[np.float32]] = []
    num_left = num_rows
    while num_left:
        rows = TensorPiece.due(await stream.receive(), ("raw",), num_left, num_columns)
        parts.append(np.frombuffer(rows.payload, dtype="<f4").reshape(-1, num_columns).astype(np.float32))
        num_left -= rows.num_rows
    answer = np.concatenate(parts).astype(np.float64)
    if not np.isfinite(answer).all():
        raise PeerViolation("the numbers are not all finite")
    return answer
