"""Decode through families whose blocks are like Llama's: the modules' own projections, and few loops between them.

A block of transformers' modules is some 60 small operations. Other servers run between two tokens of one server, and
weights pass through the caches, so the code of each operation is fetched from memory again: for a small model that
takes longer than the weights. Here a block is its matrix products, a norm, attention over the pool, and another norm. A
family is decoded this way if its blocks have the parts by the usual names and give the same as transformers' own code
when `span_loading` tries them. All other families, and all steps with prompts, go through transformers' modules.

Sources: paged attention after Kwon et al. 2023, arXiv:2309.06180; rotary embeddings Su et al. 2021, arXiv:2104.09864.
Legend of shapes: N rows (one per sequence), H hidden size, Q query heads, K heads of keys and values, A all of them
(Q + 2K), D width of a head, I the MLP's width.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.serving.model import fused_kernels
from swarm.serving.model.batch import PAGE_TOKENS, Slice
from swarm.serving.model.fused_kernels import Floats, FusedKernels, Ints, Pair
from swarm.serving.model.kv_pool import KVPool
from swarm.serving.model.packing import joint

logger = logging.getLogger(__name__)

_PARTS = (
    "input_layernorm.weight", "input_layernorm.variance_epsilon", "post_attention_layernorm.weight",
    "post_attention_layernorm.variance_epsilon", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.head_dim", "self_attn.scaling", "mlp",
)  # fmt: skip


_TABLE_TOKENS = 4096
"""Positions of which the rotation is kept: some megabytes."""


@functools.cache
def kernels() -> FusedKernels | None:
    """Compiled at the first use on a machine, which takes some seconds. None where they cannot be."""
    try:
        return fused_kernels.load()
    except Exception as error:  # of numba's own kinds, too, where a later version no longer knows what we ask for
        logger.warning("decoding is slower here than it could be, because numba cannot be used: %s", error)
        return None


class FusedBlocks:
    """Runs rows of decodes through `blocks`, whose `rotary` embedding is the model's."""

    def __init__(self, blocks: Sequence[Any], rotary: Any, found: FusedKernels) -> None:
        self._blocks = [_FusedBlock(block, found) for block in blocks]
        self._rotary = rotary
        self._table: Pair | None = None

    def run(self, x_NH: Tensor, slices: Sequence[Slice], pool: KVPool, first: int, end: int) -> Tensor:
        """Through blocks `first` to `end`, counted from the span's. `x_NH` float32; every slice is one row."""
        rotation = self._rotation(x_NH, [piece.position for piece in slices])
        places: dict[int, Ints] = {}
        hidden_NH, delta_NH = x_NH.numpy().copy(), np.zeros(x_NH.shape, np.float32)
        for index in range(first, end):
            block, cache = self._blocks[index], (pool.keys_SKD[index].numpy(), pool.values_SKD[index].numpy())
            if block.window not in places:
                places[block.window] = _places(slices, block.window)
            delta_NH = block.run(hidden_NH, delta_NH, rotation, cache, places[block.window])
        return torch.from_numpy(hidden_NH + delta_NH)

    def _rotation(self, x_NH: Tensor, positions: Sequence[int]) -> Pair:
        """The model's embedding is a dozen small operations, so that those of the first positions are kept."""
        if max(positions) >= _TABLE_TOKENS:
            return self._rotations(x_NH, torch.tensor(positions))
        if self._table is None:
            self._table = self._rotations(x_NH, torch.arange(_TABLE_TOKENS))
        cosines, sines = self._table
        return cosines[positions], sines[positions]

    def _rotations(self, x_NH: Tensor, positions_T: Tensor) -> Pair:
        cosines, sines = self._rotary(x_NH[None], positions_T[None])
        return cosines[0].contiguous().numpy(), sines[0].contiguous().numpy()


class _FusedBlock:
    def __init__(self, block: Any, found: FusedKernels) -> None:
        attention = block.self_attn
        self._attention, self._mlp = attention, block.mlp
        self._before = _norm(block.input_layernorm)
        self._between = _norm(block.post_attention_layernorm)
        self._width = int(attention.head_dim)
        self._scale = float(attention.scaling)
        config = getattr(attention, "config", None)
        # of its own, or for all blocks
        self.window = int(getattr(attention, "sliding_window", getattr(config, "sliding_window", None)) or 0)
        self._projections = attention.q_proj, attention.k_proj, attention.v_proj
        self._head_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._joined_projection = joint(self._projections)
        gated = [getattr(block.mlp, name, None) for name in ("gate_proj", "up_proj")]
        is_gated = hasattr(block.mlp, "down_proj") and hasattr(block.mlp, "act_fn")
        self._joined_gate = joint(gated) if is_gated else None
        self._kernels = found

    def run(self, hidden_NH: Floats, delta_NH: Floats, rotation: Pair, cache: Pair, places: Ints) -> Floats:
        """Adds to `hidden_NH` what came before, `delta_NH`, and returns what comes after it."""
        num_keys = cache[0].shape[1]
        heads_NAD = self._heads(self._norm(hidden_NH, delta_NH, self._before), num_keys)
        num_queries = heads_NAD.shape[1] - 2 * num_keys
        out_NQD = np.empty((len(heads_NAD), num_queries, self._width), np.float32)
        self._kernels.remember(heads_NAD, rotation, cache, places)
        self._kernels.attend(heads_NAD, rotation, cache, places, self._scale, out_NQD)
        attended_NH = _apply(self._attention.o_proj, out_NQD.reshape(len(out_NQD), -1))
        return self._feed(self._norm(hidden_NH, attended_NH, self._between))

    def _heads(self, x_NH: Floats, num_keys: int) -> Floats:
        """Queries, keys and values of each row, one head after another."""
        if self._joined_projection is not None:
            heads_NAD = _apply(self._joined_projection, x_NH).reshape(len(x_NH), -1, self._width)
        else:
            parts = [_apply(project, x_NH) for project in self._projections]
            heads_NAD = np.concatenate(parts, 1).reshape(len(x_NH), -1, self._width)
        queries_keys = heads_NAD[:, : -2 * num_keys], heads_NAD[:, -2 * num_keys : -num_keys]
        for part_NAD, norm in zip(queries_keys, self._head_norms, strict=True):
            if norm is not None:
                part_NAD[:] = _apply(norm, part_NAD)
        return heads_NAD

    def _feed(self, x_NH: Floats) -> Floats:
        """Through the MLP, or the experts."""
        if self._joined_gate is None:
            return _apply(self._mlp, x_NH[None]).reshape(x_NH.shape)
        gate_NI, up_NI = torch.from_numpy(_apply(self._joined_gate, x_NH)).chunk(2, 1)
        return _apply(self._mlp.down_proj, (self._mlp.act_fn(gate_NI) * up_NI).numpy())

    def _norm(self, hidden_NH: Floats, delta_NH: Floats, norm: tuple[Floats, float]) -> Floats:
        out_NH = np.empty_like(hidden_NH)
        self._kernels.add_norm(hidden_NH, delta_NH, *norm, out_NH)
        return out_NH


def _apply(module: Any, x: Floats) -> Floats:
    out: Tensor = module(torch.from_numpy(x))
    return out.numpy()


def _norm(module: Any) -> tuple[Floats, float]:
    return module.weight.detach().numpy(), float(module.variance_epsilon)


def _places(slices: Sequence[Slice], window: int) -> Ints:
    """Return the `places` of `fused_kernels`. The padding behind a shorter row's pages is never read."""
    num_pages = [piece.position // PAGE_TOKENS + 1 for piece in slices]
    places = np.zeros((len(slices), 2 + max(num_pages)), np.int64)
    for place, piece, num in zip(places, slices, num_pages, strict=True):
        place[0] = max(0, piece.position + 1 - window) if window else 0
        place[1] = piece.position
        place[2 : 2 + num] = piece.pages[:num]
    return places


def is_for(dtype: torch.dtype, device: str) -> bool:
    """Return whether the loops are for computing in `dtype` on a torch `device`."""
    return dtype == torch.float32 and device == "cpu"


def fused_blocks(blocks: Sequence[Any], base: Any, dtype: torch.dtype, device: torch.device) -> FusedBlocks | None:
    """Return None where the blocks are built otherwise, or are not computed in float32 on a CPU."""
    rotary = getattr(base, "rotary_emb", None)
    if not is_for(dtype, device.type) or rotary is None:
        return None
    if not all(_has(block, part) for block in blocks for part in _PARTS) or any(map(_uses_positions, blocks)):
        return None
    if (found := kernels()) is None:
        return None
    try:
        return FusedBlocks(blocks, rotary, found)
    except (TypeError, ValueError, RuntimeError):  # a part of the usual name that is something else
        return None


def _uses_positions(block: Any) -> bool:
    """Return whether its attention uses positions for more than rotation, perhaps only far beyond those that are
    tried: Ministral 3 makes queries larger after the first 16384."""
    return "position_ids" in inspect.signature(block.self_attn.forward).parameters


def _has(block: Any, path: str) -> bool:
    found = block
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is not None
