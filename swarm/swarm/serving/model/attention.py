"""Attention of a batch's pieces over a paged pool, and the caches through which transformers' modules write to the
pool.

transformers' modules pass each block's new keys and values to a cache, which writes them to the pool, and then call the
attention function of their config. With RAGGED this is `ragged_attention`, which computes all pieces of the batch at
once; transformers makes no mask for a function that it does not know. `GatheredCache` is for families that cannot run
this way: it takes one piece at a time, for transformers' own attention and masks.

Measurements of decodes of 1 and 16 sequences over 64, 512 and 2048 positions on a CPU determined how keys are read.
Consecutive pages are read in place (7 times as fast as a copy at 16 x 2048); other pages are first copied together.
Decodes over few positions share one padded call (twice as fast at 16 x 64, where calls cost more than copies). An
accelerator pads all decodes, as far as memory allows.

Sources: paged attention after Kwon et al. 2023, arXiv:2309.06180; windows as in Mistral, arXiv:2310.06825; sinks as in
gpt-oss; capped logits as in Gemma 2, arXiv:2408.00118.
Shapes: N rows of the batch, T rows of a piece, L positions it reads, B decodes, Q query heads, K heads of
keys and values, D width of a head, S slots of the pool.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax
from transformers import AttentionInterface, Cache

from swarm.serving.model.batch import SequenceRows
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool, KVShape

SHORT_TOKENS = 128
"""Maximum positions of decodes that share one padded call on a CPU."""

MAX_PADDED_TOKENS = 2**18
"""Maximum positions, with padding, that an accelerator copies together for one call."""

RAGGED = "swarm_ragged"


def cache_argument(model: nn.Module) -> str:
    """Return the name of the argument with which `model` is given its cache: transformers 5.24 has renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Extensions of a family's attention to softmax(scale q k) v: scale, window, cap of the logits, and sinks."""

    scale: float | None
    window: int | None
    cap: float | None
    sinks_Q: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Rows that one call computes: one piece, or (`is_padded`) B decodes together.

    `seen` are the slots of their keys in the pool, or the ids [B, pages] of their pages. `mask` is [T, L] or [B, 1, 1,
    L]. None: each row sees all positions, or with `is_causal` those up to its own.
    """

    rows: slice | Tensor
    seen: slice | Tensor
    mask: Tensor | None
    is_causal: bool = False
    is_padded: bool = False


def plan(pieces: Sequence[SequenceRows], window: int | None, device: torch.device) -> list[AttentionCall]:
    """Choose the calls that together compute every row of `pieces` once."""
    longest = max(s.position + 1 for s in pieces)
    is_short = longest <= SHORT_TOKENS
    if device.type != "cpu":
        is_short = longest * len(pieces) <= MAX_PADDED_TOKENS
    parts, decodes, row = [], [], 0
    for piece in pieces:
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


def _alone(piece: SequenceRows, rows: slice, window: int | None, device: torch.device) -> AttentionCall:
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


def _together(decodes: Sequence[tuple[int, SequenceRows]], window: int | None, device: torch.device) -> AttentionCall:
    """Make one padded call. The padding is the piece's own first page, so that numbers of two sequences are never
    combined."""
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
    """Return a mask that is True for the positions that a row sees."""
    mask_TL = seen_L <= positions_T[:, None]
    return mask_TL & (seen_L > positions_T[:, None] - window) if window else mask_TL


def _where(piece: SequenceRows, begin: int, end: int, device: torch.device) -> slice | Tensor:
    """Return the slots of positions [begin, end): a slice if their pages are consecutive."""
    first_page, num_pages = begin // PAGE_TOKENS, -(-end // PAGE_TOKENS)
    pages = list(piece.pages[first_page:num_pages])
    if pages == list(range(pages[0], pages[0] + len(pages))):
        offset = (pages[0] - first_page) * PAGE_TOKENS
        return slice(begin + offset, end + offset)
    return slots_of(piece, begin, end).to(device)


def slots_of(piece: SequenceRows, begin: int, end: int) -> Tensor:
    if end - begin == 1:
        return torch.tensor([piece.pages[begin // PAGE_TOKENS] * PAGE_TOKENS + begin % PAGE_TOKENS])
    positions = torch.arange(begin, end)
    return torch.tensor(list(piece.pages))[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


def compute(
    part: AttentionCall, query_NQD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, how: AttentionSettings
) -> Tensor:
    """Return [rows of the part, Q, D]. Queries that share a head of keys become rows of one head, which saves
    copies."""
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
    """Return the part's keys or values as [1, K, L, D], or [B, K, L, D]."""
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
    """Return [B, heads, T, D] of queries over [B, K, L, D]."""
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


_current: ContextVar[RaggedCache | None] = ContextVar("pass", default=None)


class ShapeRecorder(Cache):  # type: ignore[misc]
    """Records the shapes of what each block would cache, and caches nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, KVShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        num_heads, _, key_width = key_states.shape[1:]
        self.shapes[layer_idx] = KVShape(num_heads=num_heads, key_width=key_width, value_width=value_states.shape[-1])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return query_length, 0


class PoolCache(Cache):  # type: ignore[misc]
    """A transformers cache whose entries are in a pool's pages. Has the slots of one pass's rows."""

    def __init__(self, pool: KVPool, pieces: Sequence[SequenceRows]) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self._pieces = pieces
        self._device = pool.device
        self._slots_N = torch.cat([slots_of(s, s.position, s.position + s.num_tokens) for s in pieces]).to(self._device)
        self._unused_S = torch.cat([_unused(s) for s in pieces]).to(self._device)

    @property
    def positions(self) -> Tensor:
        """The positions of the rows, [1, N]."""
        rows = [torch.arange(s.position, s.position + s.num_tokens) for s in self._pieces]
        return torch.cat(rows)[None].to(self._device)

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write `keys` and `values`, [1, K, N, D], to the pool."""
        self._pool.keys_SKD[layer].index_copy_(0, self._slots_N, keys[0].transpose(0, 1))
        self._pool.values_SKD[layer].index_copy_(0, self._slots_N, values[0].transpose(0, 1))
        if len(self._unused_S):
            self._pool.keys_SKD[layer].index_fill_(0, self._unused_S, 0)
            self._pool.values_SKD[layer].index_fill_(0, self._unused_S, 0)


def _unused(piece: SequenceRows) -> Tensor:
    """Return the slots after the piece's rows in a page that they begin.

    Whole pages are read, and positions after a row are masked. But a number that is not finite, left there by a failed
    sequence, would pass any mask.
    """
    end = piece.position + piece.num_tokens
    page_start = (end - 1) // PAGE_TOKENS * PAGE_TOKENS
    is_begun = piece.position <= page_start
    return slots_of(piece, end, page_start + PAGE_TOKENS if is_begun else end)


class GatheredCache(PoolCache):
    """The cache of one piece, copied together for transformers' own attention functions and masks."""

    def __init__(self, pool: KVPool, piece: SequenceRows) -> None:
        super().__init__(pool, [piece])
        self._end = piece.position + piece.num_tokens
        self._position = piece.position
        self._seen_L = slots_of(piece, 0, self._end).to(self._device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._write(layer_idx, key_states, value_states)
        keys = self._pool.keys_SKD[layer_idx].index_select(0, self._seen_L)
        values = self._pool.values_SKD[layer_idx].index_select(0, self._seen_L)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self._position

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return self._end, 0


class RaggedCache(PoolCache):
    """The cache of all pieces of a batch in one pass. Use it as a context around the model's forward."""

    def __init__(self, pool: KVPool, pieces: Sequence[SequenceRows]) -> None:
        super().__init__(pool, pieces)
        self._parts_by_window: dict[int | None, list[AttentionCall]] = {}
        self._layer = -1
        self._keys: Tensor | None = None

    def __enter__(self) -> RaggedCache:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_error: object) -> None:
        _current.reset(self._token)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._write(layer_idx, key_states, value_states)
        self._layer, self._keys = layer_idx, key_states
        return key_states, value_states

    def attend(self, query: Tensor, keys: Tensor, how: AttentionSettings) -> Tensor:
        """Compute the attention of `query` [1, Q, N, D] over what `update` has just written. Returns [1, N, Q, D].

        Raises NotImplementedError if the block has changed its keys since then.
        """
        if keys is not self._keys:
            raise NotImplementedError("keys are changed after they were cached")
        window = how.window
        if (parts := self._parts_by_window.get(window)) is None:
            parts = self._parts_by_window[window] = plan(self._pieces, window, self._device)
        keys_SKD, values_SKD = self._pool.keys_SKD[self._layer], self._pool.values_SKD[self._layer]
        query_NQD = query[0].transpose(0, 1)
        if len(parts) == 1:
            return compute(parts[0], query_NQD, keys_SKD, values_SKD, how)[None]
        out_NQD = query.new_empty(query_NQD.shape[0], query_NQD.shape[1], values_SKD.shape[2])
        for part in parts:
            out_NQD[part.rows] = compute(part, query_NQD[part.rows], keys_SKD, values_SKD, how)
        return out_NQD[None]


def ragged_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    _value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,  # transformers passes all arguments of the model's call
) -> tuple[Tensor, None]:
    """Compute attention for transformers' modules within a RaggedCache context."""
    cache = _current.get()
    assert cache is not None, "ragged attention outside of a pass"
    if others.get("position_bias") is not None:
        raise NotImplementedError("attention with a bias by position")
    return cache.attend(query, key, AttentionSettings(scaling, sliding_window, softcap, s_aux)), None


AttentionInterface.register(RAGGED, ragged_attention)
