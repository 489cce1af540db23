"""The pool as transformers sees it during a pass: caches whose entries lie in pages, and an attention function.

transformers' modules hand a cache each block's new keys and values, which it writes into the pool, and then call the
attention function of their config. Under RAGGED that is `ragged_attention`, which computes all slices of the batch at
once; no mask is made, for transformers makes none for a function it does not know. `GatheredCache` serves families
that cannot go that way: one slice at a time, through transformers' own attention and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

from swarm.serving.model.attention import AttentionCall, AttentionSettings, compute, plan, slots_of
from swarm.serving.model.batch import PAGE_TOKENS, Slice
from swarm.serving.model.kv_pool import KVPool, KVShape

RAGGED = "swarm_ragged"

_current: ContextVar[RaggedCache | None] = ContextVar("pass", default=None)


class ShapeRecorder(Cache):  # type: ignore[misc]
    """Keeps nothing but what each block would have it keep."""

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
    """A transformers cache whose entries lie in a pool's pages. Holds the slots of one pass's rows."""

    def __init__(self, pool: KVPool, slices: Sequence[Slice]) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self._slices = slices
        self._device = pool.keys_SKD[0].device
        self._slots_N = torch.cat([slots_of(s, s.position, s.position + s.num_tokens) for s in slices]).to(self._device)
        self._unused_S = torch.cat([_unused(s) for s in slices]).to(self._device)

    @property
    def positions(self) -> Tensor:
        """Of the rows, [1, N]."""
        rows = [torch.arange(s.position, s.position + s.num_tokens) for s in self._slices]
        return torch.cat(rows)[None].to(self._device)

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """`keys` and `values` are [1, K, N, D]."""
        self._pool.keys_SKD[layer].index_copy_(0, self._slots_N, keys[0].transpose(0, 1))
        self._pool.values_SKD[layer].index_copy_(0, self._slots_N, values[0].transpose(0, 1))
        if len(self._unused_S):
            self._pool.keys_SKD[layer].index_fill_(0, self._unused_S, 0)
            self._pool.values_SKD[layer].index_fill_(0, self._unused_S, 0)


def _unused(piece: Slice) -> Tensor:
    """The slots behind the slice's rows in a page that these begin.

    Whole pages are read and what lies behind a row is masked, but a number that is not finite, left there by a seat
    that failed, would pass through any mask.
    """
    end = piece.position + piece.num_tokens
    page_start = (end - 1) // PAGE_TOKENS * PAGE_TOKENS
    is_begun = piece.position <= page_start
    return slots_of(piece, end, page_start + PAGE_TOKENS if is_begun else end)


class GatheredCache(PoolCache):
    """One slice alone, its entries copied together for attention functions and masks of transformers' own."""

    def __init__(self, pool: KVPool, piece: Slice) -> None:
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
    """All slices of a batch in one pass. Use as a context around the model's forward."""

    def __init__(self, pool: KVPool, slices: Sequence[Slice]) -> None:
        super().__init__(pool, slices)
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
        """`query` [1, Q, N, D] over what `update` has just written. Returns [1, N, Q, D].

        Raises NotImplementedError if the block has changed its keys since.
        """
        if keys is not self._keys:
            raise NotImplementedError("keys are changed after they were cached")
        window = how.window
        if (parts := self._parts_by_window.get(window)) is None:
            parts = self._parts_by_window[window] = plan(self._slices, window, self._device)
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
    **others: Any,  # transformers passes on whatever a model was called with
) -> tuple[Tensor, None]:
    """An attention function as transformers wants it, for modules that run within a RaggedCache."""
    cache = _current.get()
    assert cache is not None, "ragged attention outside of a pass"
    if others.get("position_bias") is not None:
        raise NotImplementedError("attention with a bias by position")
    return cache.attend(query, key, AttentionSettings(scaling, sliding_window, softcap, s_aux)), None


AttentionInterface.register(RAGGED, ragged_attention)
