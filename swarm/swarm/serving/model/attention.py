"""Attention of the slices of one batch over a paged pool: which calls compute which rows, and those calls.

How keys are read was chosen by measuring decodes of 1 and 16 seats over 64, 512 and 2048 positions on a
CPU. Pages that follow one another are read where they lie (7 times as fast as copying them at 16 x 2048); other pages
are copied together first; decodes over few positions share one padded call (twice as fast at 16 x 64, where calls cost
more than copies). An accelerator pads all decodes, as far as memory allows.

Pure but for reading the pool. Sources: paged attention after Kwon et al. 2023, arXiv:2309.06180; windows as in
Mistral, arXiv:2310.06825; sinks as in gpt-oss; capped logits as in Gemma 2, arXiv:2408.00118.
Legend of shapes: N rows of the batch, T rows of a slice, L positions it reads, B decodes, Q query heads, K heads of
keys and values, D width of a head, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from swarm.serving.model.batch import PAGE_TOKENS, Slice

SHORT_TOKENS = 128
"""Decodes over no more positions share one padded call on a CPU."""

MAX_PADDED_TOKENS = 2**18
"""Positions, with padding, that an accelerator copies together for one call."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What a family's attention asks for besides softmax(scale q k) v."""

    scale: float | None
    window: int | None
    cap: float | None
    sinks_Q: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Rows that one call computes: a slice alone, or (`is_padded`) B decodes together.

    `seen` is where their keys lie: slots of the pool, or the ids [B, pages] of pages. `mask` is [T, L] or
    [B, 1, 1, L], None where everything, or with `is_causal` everything up to itself, is seen.
    """

    rows: slice | Tensor
    seen: slice | Tensor
    mask: Tensor | None
    is_causal: bool = False
    is_padded: bool = False


def plan(slices: Sequence[Slice], window: int | None, device: torch.device) -> list[AttentionCall]:
    """Which calls compute the rows of `slices`, together every row once."""
    longest = max(s.position + 1 for s in slices)
    is_short = longest <= SHORT_TOKENS
    if device.type != "cpu":
        is_short = longest * len(slices) <= MAX_PADDED_TOKENS
    parts, decodes, row = [], [], 0
    for piece in slices:
        if piece.num_tokens == 1 and (is_short or piece.position < SHORT_TOKENS):
            decodes.append((row, piece))
        else:
            parts.append(_alone(piece, slice(row, row + piece.num_tokens), window, device))
        row += piece.num_tokens
    if len(decodes) > 1:
        parts.append(_together(decodes, window, device))
    else:
        parts.extend(_alone(piece, slice(row, row + 1), window, device) for row, piece in decodes)
    return parts


def _alone(piece: Slice, rows: slice, window: int | None, device: torch.device) -> AttentionCall:
    end = piece.position + piece.num_tokens
    begin = max(0, piece.position + 1 - window) if window else 0
    seen = _where(piece, begin, end, device)
    if piece.num_tokens == 1:
        return AttentionCall(rows, seen, None)
    if not piece.position and (not window or end <= window):
        return AttentionCall(rows, seen, None, is_causal=True)
    return AttentionCall(
        rows, seen, _mask(torch.arange(piece.position, end), torch.arange(begin, end), window).to(device)
    )


def _together(decodes: Sequence[tuple[int, Slice]], window: int | None, device: torch.device) -> AttentionCall:
    """Padding is the slice's own first page, so that no seat's numbers ever meet another's."""
    num_pages = [piece.position // PAGE_TOKENS + 1 for _, piece in decodes]
    longest = max(num_pages)
    pages = [
        [*piece.pages[:num], *[piece.pages[0]] * (longest - num)]
        for num, (_, piece) in zip(num_pages, decodes, strict=True)
    ]
    positions = torch.tensor([piece.position for _, piece in decodes])
    mask_BL = _mask(positions, torch.arange(longest * PAGE_TOKENS), window)
    first, last = decodes[0][0], decodes[-1][0]
    rows: slice | Tensor = slice(first, last + 1)
    if last - first + 1 != len(decodes):
        rows = torch.tensor([row for row, _ in decodes], device=device)
    return AttentionCall(rows, torch.tensor(pages, device=device), mask_BL[:, None, None].to(device), is_padded=True)


def _mask(positions_T: Tensor, seen_L: Tensor, window: int | None) -> Tensor:
    """True where a row may look."""
    mask_TL = seen_L <= positions_T[:, None]
    return mask_TL & (seen_L > positions_T[:, None] - window) if window else mask_TL


def _where(piece: Slice, begin: int, end: int, device: torch.device) -> slice | Tensor:
    """The slots of positions [begin, end): a slice if their pages follow one another."""
    first_page, num_pages = begin // PAGE_TOKENS, -(-end // PAGE_TOKENS)
    pages = list(piece.pages[first_page:num_pages])
    if pages == list(range(pages[0], pages[0] + len(pages))):
        offset = (pages[0] - first_page) * PAGE_TOKENS
        return slice(begin + offset, end + offset)
    return slots_of(piece, begin, end).to(device)


def slots_of(piece: Slice, begin: int, end: int) -> Tensor:
    if end - begin == 1:
        return torch.tensor([piece.pages[begin // PAGE_TOKENS] * PAGE_TOKENS + begin % PAGE_TOKENS])
    positions = torch.arange(begin, end)
    return torch.tensor(list(piece.pages))[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


def compute(
    part: AttentionCall, query_NQD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, how: AttentionSettings
) -> Tensor:
    """Returns [rows of the part, Q, D]. Queries that share a head of keys are rows of one head, which saves copies."""
    num_rows, num_heads = query_NQD.shape[:2]
    keys, values = _seen(part, keys_SKD), _seen(part, values_SKD)
    num_kv_heads = keys.shape[1]
    if num_rows == 1 or part.is_padded:
        query = query_NQD.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, -1)
        sinks = None if how.sinks_Q is None else how.sinks_Q.view(1, num_kv_heads, -1, 1)
        out = _dot_product(query, keys, values, part, how, sinks)
        return out.reshape(num_rows, num_heads, -1)
    query = query_NQD.transpose(0, 1)[None]
    sinks = None if how.sinks_Q is None else how.sinks_Q.view(1, num_heads, 1, 1)
    return _dot_product(query, keys, values, part, how, sinks)[0].transpose(0, 1)


def _seen(part: AttentionCall, tensor_SKD: Tensor) -> Tensor:
    """The part's keys or values as [1, K, L, D], or [B, K, L, D]."""
    if isinstance(part.seen, slice):
        return tensor_SKD[part.seen].transpose(0, 1)[None]
    if not part.is_padded:
        return tensor_SKD.index_select(0, part.seen).transpose(0, 1)[None]
    num_slots, num_heads, width = tensor_SKD.shape
    by_page = tensor_SKD.view(num_slots // PAGE_TOKENS, -1).index_select(0, part.seen.view(-1))
    return by_page.view(part.seen.shape[0], -1, num_heads, width).transpose(1, 2)


def _dot_product(
    query: Tensor, keys: Tensor, values: Tensor, part: AttentionCall, how: AttentionSettings, sinks: Tensor | None
) -> Tensor:
    """[B, heads, T, D] of queries over [B, K, L, D]."""
    num_shared = query.shape[1] // keys.shape[1]
    if not how.cap and sinks is None:
        return scaled_dot_product_attention(
            query, keys, values, part.mask, is_causal=part.is_causal, scale=how.scale, enable_gqa=num_shared > 1
        )
    if num_shared > 1:
        keys, values = keys.repeat_interleave(num_shared, 1), values.repeat_interleave(num_shared, 1)
    scores = query @ keys.transpose(2, 3) * (how.scale or query.shape[-1] ** -0.5)
    if how.cap:
        scores = torch.tanh(scores / how.cap) * how.cap
    mask = part.mask
    if part.is_causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = softmax(scores, -1, dtype=torch.float32).to(query.dtype)[..., : keys.shape[2]]
    return weights @ values
