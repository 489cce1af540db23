"""Runs one pass over a span's weights for the rows of many sequences. Blocks: for the engine's thread.

If a sequence's numbers are not finite, only that sequence fails, or only its drafts if it runs without them. If a whole
pass fails, each sequence is tried alone. Both are possible because keys and values of a position may be written twice.

Shapes: T rows of a sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from swarm_protocol.errors import SessionError
from swarm_protocol.session_frames import SampledToken
from torch import Tensor

from swarm.serving.model.attention import slots_of
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.kv_pool import KVPool
from swarm.serving.sampling.drawing import pick_all
from swarm.serving.sampling.sampling import Pick


class RunnableSpan(Protocol):
    """The part of a span that the engine uses."""

    start: int
    end: int
    num_blocks: int
    hidden_size: int
    vocab_size: int
    context_tokens: int

    def run(self, batch: Batch, pool: KVPool, /) -> list[Tensor | None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPiece:
    """One sequence's rows: x is int64 [T] or float [T, H], the last ones the drafts of `pick`. `rows.want` covers what
    `want` and `pick` need."""

    x: Tensor
    rows: SequenceRows
    want: Want
    pick: Pick | None


@dataclass(slots=True, kw_only=True)
class PieceResult:
    """The wanted `output` (float32 on the CPU) and the picked `tokens`, if any, or the error. All but the last of the
    tokens are drafts. If it `lacks_drafts`, it is that of the rows before them."""

    output: Tensor | None = None
    tokens: list[SampledToken] = field(default_factory=list)
    error: SessionError | None = None
    lacks_drafts: bool = False


def compute(
    span: RunnableSpan, pool: KVPool, pieces: Sequence[BatchPiece], blocks: tuple[int, int]
) -> tuple[list[PieceResult], float | None]:
    """Return the result of each piece, and the milliseconds of the pass, or None if pieces ran alone."""
    since = time.perf_counter()
    try:
        computed = _compute_together(span, pool, pieces, blocks)
    except Exception as error:  # a bug or an exhausted device, which the session reports
        if len(pieces) == 1:
            failure = SessionError(f"the server could not compute a step: {type(error).__name__}: {error}")
            return [PieceResult(error=failure)], None
        return [compute(span, pool, [piece], blocks)[0][0] for piece in pieces], None
    for index, piece in enumerate(pieces):
        if computed[index].error is not None and piece.rows.num_drafts:
            computed[index] = _compute_without_drafts(span, pool, piece, blocks)
    return computed, (time.perf_counter() - since) * 1000


@torch.inference_mode()
def _compute_without_drafts(
    span: RunnableSpan, pool: KVPool, piece: BatchPiece, blocks: tuple[int, int]
) -> PieceResult:
    rows, num_firm = piece.rows, piece.rows.num_tokens - piece.rows.num_drafts
    # a number that is not finite would pass the masks of later passes, which read whole pages
    pool.clear(slots_of(rows, rows.position + num_firm, rows.position + rows.num_tokens))
    firm = BatchPiece(
        x=piece.x[:num_firm],
        rows=replace(rows, num_tokens=num_firm, num_drafts=0),
        want=piece.want,
        pick=piece.pick and replace(piece.pick, drafts=()),
    )
    (result,) = compute(span, pool, [firm], blocks)[0]
    result.lacks_drafts = True
    return result


@torch.inference_mode()
def _compute_together(
    span: RunnableSpan, pool: KVPool, pieces: Sequence[BatchPiece], blocks: tuple[int, int]
) -> list[PieceResult]:
    batch = Batch(
        x=_joined([piece.x for piece in pieces]),
        pieces=tuple(piece.rows for piece in pieces),
        start=blocks[0],
        end=blocks[1],
    )
    outputs = span.run(batch, pool)
    if pool.device.type != "cpu":
        torch.accelerator.synchronize(pool.device)  # else the next pass would include this one's time
    computed = [PieceResult() for _ in pieces]
    found = [(into, piece, out) for into, piece, out in zip(computed, pieces, outputs, strict=True) if out is not None]
    _give_outputs([(into, out) for into, piece, out in found if piece.want is not Want.NOTHING])
    _give_tokens([(into, out, piece.pick) for into, piece, out in found if piece.pick])
    return computed


def _give_outputs(wanted: Sequence[tuple[PieceResult, Tensor]]) -> None:
    if not wanted:
        return
    rows = _joined([out for _, out in wanted]).to("cpu", torch.float32)
    after = 0
    for (found, out), is_finite in zip(wanted, _finite(rows, [len(out) for _, out in wanted]), strict=True):
        found.output = rows[after : after + len(out)]
        after += len(out)
        _check_finite(found, is_finite=is_finite)


def _give_tokens(picking: Sequence[tuple[PieceResult, Tensor, Pick]]) -> None:
    for found, out, pick in picking:
        if pick.drafts:  # a hidden state that is not finite makes every logit so, and spoils the cache
            _check_finite(found, is_finite=bool(out[-len(pick.drafts) :, 0].isfinite().all()))
    while picking:
        picked = pick_all([out[-1 - len(pick.drafts)] for _, out, pick in picking], [pick for _, _, pick in picking])
        following = []
        for (found, out, pick), token in zip(picking, picked, strict=True):
            _check_finite(found, is_finite=token is not None)
            if token is None:
                continue
            found.tokens.append(token)
            if pick.drafts and pick.drafts[0][0] == token.token_id:
                following.append((found, out, pick.then()))
        picking = following


def _check_finite(found: PieceResult, *, is_finite: bool) -> None:
    if not is_finite:
        found.error = SessionError("a step gave numbers that are not finite", remedy="use a model in a wider dtype")


def _finite(rows: Tensor, sizes: Sequence[int]) -> list[bool]:
    """Return for each group of rows whether its sums are finite, and so its numbers are finite and not extremely
    large."""
    # numpy wakes no other threads, which would take longer than this
    each = [math.isfinite(total) for total in rows.numpy().sum(axis=1)]
    ends = itertools.accumulate(sizes)
    return [all(each[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
