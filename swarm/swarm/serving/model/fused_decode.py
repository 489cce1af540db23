"""Fast decoding for families with blocks like Llama's: the modules' own projections, with few loops between them.

A block of transformers' modules has some 60 small operations. Between two tokens of a sequence, weights and other
processes displace their code from the caches, so it is fetched from memory again. For a small model this takes longer
than reading the weights. Here a block is only its matrix products, a norm, attention over the pool, and another norm. A
family is decoded this way if its blocks have the usual parts and names, and give the same results as transformers' code
when `span_loading` tries them. All other families, and all steps with prompts, use transformers' modules.

numba compiles the loops, which run without the GIL, and caches them on disk. The functions at the end are their source,
and are not called as Python. Sums may be computed in any order, so that LLVM vectorizes them. Numbers that are not
finite stay so.

Sources: paged attention after Kwon et al. 2023, arXiv:2309.06180; rotary embeddings Su et al. 2021, arXiv:2104.09864.
Shapes: N rows (one per sequence), H hidden size, Q query heads, K heads of keys and values, A all heads (Q +
2K: queries, keys, values), D width of a head, R its rotated part, I the MLP's width, S slots of the pool, L positions
that a row sees, P pages of the longest row. `rotation` is cosines and sines [N, R], `cache` keys and values [S, K, D].
`places` [N, 2 + P] has for each row the first position that it sees, its own position, and the pages up to it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_compression.compiled import compiled
from torch import Tensor

from swarm.serving.model.batch import SequenceRows
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool
from swarm.serving.model.packing import joint

logger = logging.getLogger(__name__)

_PARTS = (
    "input_layernorm.weight", "input_layernorm.variance_epsilon", "post_attention_layernorm.weight",
    "post_attention_layernorm.variance_epsilon", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.head_dim", "self_attn.scaling", "mlp",
)  # fmt: skip


_TABLE_TOKENS = 4096
"""Positions whose rotation is cached: some megabytes."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Pair = tuple[Floats, Floats]

_PAGE = PAGE_TOKENS
_FLAGS = {"reassoc", "contract", "arcp", "nsz"}

_AHEAD = 4
"""Positions by which keys and values are prefetched. Processors prefetch by themselves, but not from one 4 KiB page
into the next, and a position takes half a page or more."""

_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """The compiled loops of a block: the norm, the writing of keys and values to the pool, and attention over it."""

    add_norm: Callable[[Floats, Floats, Floats, float, Floats], None]
    remember: Callable[[Floats, Pair, Pair, Ints], None]
    attend: Callable[[Floats, Pair, Pair, Ints, float, Floats], None]


@functools.cache
def kernels() -> FusedKernels | None:
    """Return the kernels; None if they cannot be compiled. The first use on a machine compiles them, in some
    seconds."""
    try:
        return _compiled_kernels()
    except Exception as error:  # numba's own errors, too: a later version may lack what is used here
        logger.warning("decoding is slower on this machine, because numba cannot be used: %s", error)
        return None


class FusedBlocks:
    """Runs rows of decodes through `blocks`. `rotary` is the model's rotary embedding."""

    def __init__(self, blocks: Sequence[Any], rotary: Any, found: FusedKernels) -> None:
        self._blocks = [_FusedBlock(block, found) for block in blocks]
        self._rotary = rotary
        self._table: Pair | None = None

    def run(self, x_NH: Tensor, pieces: Sequence[SequenceRows], pool: KVPool, first: int, end: int) -> Tensor:
        """Run `x_NH`, float32, through blocks [first, end), counted from the span's first. Each piece has one row,
        and those of one sequence follow each other."""
        rotation = self._rotation(x_NH, [piece.position for piece in pieces])
        places: dict[int, Ints] = {}
        hidden_NH, delta_NH = x_NH.numpy().copy(), np.zeros(x_NH.shape, np.float32)
        for index in range(first, end):
            block, cache = self._blocks[index], (pool.keys_SKD[index].numpy(), pool.values_SKD[index].numpy())
            if block.window not in places:
                places[block.window] = _places(pieces, block.window)
            delta_NH = block.run(hidden_NH, delta_NH, rotation, cache, places[block.window])
        return torch.from_numpy(hidden_NH + delta_NH)

    def _rotation(self, x_NH: Tensor, positions: Sequence[int]) -> Pair:
        """Return the rotation of each row. The model's embedding takes a dozen small operations, so the rotations of
        the first positions are cached."""
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
        # the block's own window, or that of all blocks
        self.window = int(getattr(attention, "sliding_window", getattr(config, "sliding_window", None)) or 0)
        self._projections = attention.q_proj, attention.k_proj, attention.v_proj
        self._head_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._joined_projection = joint(self._projections)
        gated = [getattr(block.mlp, name, None) for name in ("gate_proj", "up_proj")]
        is_gated = hasattr(block.mlp, "down_proj") and hasattr(block.mlp, "act_fn")
        self._joined_gate = joint(gated) if is_gated else None
        self._kernels = found

    def run(self, hidden_NH: Floats, delta_NH: Floats, rotation: Pair, cache: Pair, places: Ints) -> Floats:
        """Add `delta_NH`, the previous block's output, to `hidden_NH`, and return this block's output."""
        num_keys = cache[0].shape[1]
        heads_NAD = self._heads(self._norm(hidden_NH, delta_NH, self._before), num_keys)
        num_queries = heads_NAD.shape[1] - 2 * num_keys
        out_NQD = np.empty((len(heads_NAD), num_queries, self._width), np.float32)
        self._kernels.remember(heads_NAD, rotation, cache, places)
        self._kernels.attend(heads_NAD, rotation, cache, places, self._scale, out_NQD)
        attended_NH = _apply(self._attention.o_proj, out_NQD.reshape(len(out_NQD), -1))
        return self._feed(self._norm(hidden_NH, attended_NH, self._between))

    def _heads(self, x_NH: Floats, num_keys: int) -> Floats:
        """Return the queries, keys and values of each row, head by head."""
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
        """Run the MLP or the experts."""
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


def _places(pieces: Sequence[SequenceRows], window: int) -> Ints:
    """Return `places` for the kernels. The padding after a shorter row's pages is never read."""
    num_pages = [piece.position // PAGE_TOKENS + 1 for piece in pieces]
    places = np.zeros((len(pieces), 2 + max(num_pages)), np.int64)
    for place, piece, num in zip(places, pieces, num_pages, strict=True):
        place[0] = max(0, piece.position + 1 - window) if window else 0
        place[1] = piece.position
        place[2 : 2 + num] = piece.pages[:num]
    return places


def is_for(dtype: torch.dtype, device: str) -> bool:
    """Return whether the loops can compute in `dtype` on this kind of torch `device`."""
    return dtype == torch.float32 and device == "cpu"


def fused_blocks(blocks: Sequence[Any], base: Any, dtype: torch.dtype, device: torch.device) -> FusedBlocks | None:
    """Return the blocks for fused decoding; None if they are built differently, or not computed in float32 on a CPU."""
    rotary = getattr(base, "rotary_emb", None)
    if not is_for(dtype, device.type) or rotary is None:
        return None
    if not all(_has(block, part) for block in blocks for part in _PARTS) or any(map(_uses_positions, blocks)):
        return None
    if (found := kernels()) is None:
        return None
    try:
        return FusedBlocks(blocks, rotary, found)
    except (TypeError, ValueError, RuntimeError):  # a part with the usual name may be something else
        return None


def _uses_positions(block: Any) -> bool:
    """Return whether the attention uses positions for more than rotation, perhaps only beyond the positions that are
    tried: Ministral 3 scales queries after the first 16384."""
    return "position_ids" in inspect.signature(block.self_attn.forward).parameters


def _has(block: Any, path: str) -> bool:
    found = block
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is not None


def _compiled_kernels() -> FusedKernels:
    """Compile the kernels, or load them from numba's cache. Raises ImportError if numba cannot be used."""
    import numba  # noqa: PLC0415 (a third of a second)
    import numba.extending  # noqa: PLC0415

    _overload_prefetch()
    for part in (_rotate, _slots, _score, _softmax, _weigh):
        numba.extending.register_jitable(fastmath=_FLAGS, inline="always")(part)
    types = numba.types
    number, rows, heads = types.float32, types.float32[:, ::1], types.float32[:, :, ::1]
    read_floats, read_rows, read_heads = (types.Array(number, ndim, "C", readonly=True) for ndim in (1, 2, 3))
    rotation, cache, places = types.UniTuple(read_rows, 2), types.UniTuple(heads, 2), types.int64[:, ::1]

    return FusedKernels(
        add_norm=compiled(_add_norm, types.void(rows, read_rows, read_floats, number, rows), fastmath=_FLAGS),
        remember=compiled(_remember, types.void(read_heads, rotation, cache, places), fastmath=_FLAGS),
        attend=compiled(_attend, types.void(read_heads, rotation, cache, places, number, heads), fastmath=_FLAGS),
    )


def _prefetch(array: Floats, index: int) -> None:
    """Prefetch `array[index]`. Stands for the compiler's intrinsic, for which numba has no name."""


def _overload_prefetch() -> None:
    """Make compiled code call the intrinsic."""
    from llvmlite import ir  # noqa: PLC0415
    from numba.core import cgutils, types  # noqa: PLC0415
    from numba.extending import intrinsic, overload  # noqa: PLC0415

    @intrinsic  # type: ignore[untyped-decorator]
    def ask(_typing: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows = context.make_array(signature.args[0])(context, builder, arguments[0])
            stride = builder.extract_value(rows.strides, 0)
            pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            row = builder.gep(builder.bitcast(rows.data, pointer), [builder.mul(arguments[1], stride)])
            function = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], function)
            begin, step = (context.get_constant(types.intp, value) for value in (0, _LINE_BYTES))
            with cgutils.for_range_slice(builder, begin, stride, step) as (offset, _):
                # read, high locality, data cache
                builder.call(prefetch, [builder.gep(row, [offset]), number(0), number(3), number(1)])
            return context.get_dummy_value()

        return types.void(array, index), generate

    def typed(array, index):  # type: ignore[no-untyped-def] # noqa: ARG001 (numba compares annotations, too)
        return lambda array, index: ask(array, index)  # noqa: PLW0108

    overload(_prefetch)(typed)


def _add_norm(hidden_NH: Floats, delta_NH: Floats, weight_H: Floats, eps: np.float32, out_NH: Floats) -> None:
    """Add `delta_NH` to `hidden_NH` in place, and write the RMS norm of the sum to `out_NH`."""
    size = np.float32(hidden_NH.shape[1])
    for n in range(hidden_NH.shape[0]):
        hidden_H, delta_H, out_H = hidden_NH[n], delta_NH[n], out_NH[n]
        total = np.float32(0)
        for h in range(hidden_H.size):
            value = hidden_H[h] + delta_H[h]
            hidden_H[h] = value
            total += value * value
        scale = np.float32(1) / np.sqrt(total / size + eps)
        for h in range(hidden_H.size):
            out_H[h] = weight_H[h] * (hidden_H[h] * scale)


def _rotate(vector_D: Floats, cos_R: Floats, sin_R: Floats, out_D: Floats) -> None:
    """Write `vector_D` with its first R numbers rotated (Su et al. 2021)."""
    half = cos_R.size // 2
    out_D[:] = vector_D
    for d in range(half):
        out_D[d] = vector_D[d] * cos_R[d] - vector_D[d + half] * sin_R[d]
        out_D[d + half] = vector_D[d + half] * cos_R[d + half] + vector_D[d] * sin_R[d + half]


def _remember(heads_NAD: Floats, rotation: Pair, cache: Pair, places: Ints) -> None:
    """Write each row's rotated keys and its values to its page. A row that begins a page clears the rest of it: other
    code reads whole pages, and an earlier sequence may have left numbers that are not finite."""
    keys_SKD, values_SKD = cache
    num_kv = keys_SKD.shape[1]
    num_heads = heads_NAD.shape[1] - 2 * num_kv
    for n in range(heads_NAD.shape[0]):
        position = places[n, 1]
        slot = places[n, 2 + position // _PAGE] * _PAGE + position % _PAGE
        if position % _PAGE == 0:
            keys_SKD[slot : slot + _PAGE] = 0
            values_SKD[slot : slot + _PAGE] = 0
        for k in range(num_kv):
            _rotate(heads_NAD[n, num_heads + k], rotation[0][n], rotation[1][n], keys_SKD[slot, k])
            values_SKD[slot, k, :] = heads_NAD[n, num_heads + num_kv + k]


def _slots(place_P: Ints, slot_L: Ints) -> int:
    """Write the slots of the positions that a row sees, and return their number."""
    begin = place_P[0]
    num_seen: int = place_P[1] + 1 - begin
    for i in range(num_seen):
        slot_L[i] = place_P[2 + (begin + i) // _PAGE] * _PAGE + (begin + i) % _PAGE
    return num_seen


def _score(query_QD: Floats, keys_SKD: Floats, slot_L: Ints, scale: np.float32, weight_QL: Floats) -> None:
    """Write scale q k to `weight_QL`, all heads of a position together, so that memory is read in order."""
    num_shared = query_QD.shape[0] // keys_SKD.shape[1]
    num_seen = slot_L.size
    for i in range(num_seen):
        if i + _AHEAD < num_seen:
            _prefetch(keys_SKD, slot_L[i + _AHEAD])
        keys_KD = keys_SKD[slot_L[i]]
        for q in range(query_QD.shape[0]):
            key_D, query_D = keys_KD[q // num_shared], query_QD[q]
            score = np.float32(0)
            for d in range(query_D.size):
                score += query_D[d] * key_D[d]
            weight_QL[q, i] = score * scale


def _softmax(weight_L: Floats, num_seen: int) -> None:
    largest = np.float32(-np.inf)
    for i in range(num_seen):
        largest = max(largest, weight_L[i])
    total = np.float32(0)
    for i in range(num_seen):
        weight_L[i] = np.exp(weight_L[i] - largest)
        total += weight_L[i]
    for i in range(num_seen):
        weight_L[i] /= total


def _weigh(weight_QL: Floats, values_SKD: Floats, slot_L: Ints, out_QD: Floats) -> None:
    """Write the weighted sums of the values, reading memory in order as `_score` does."""
    num_shared = out_QD.shape[0] // values_SKD.shape[1]
    num_seen = slot_L.size
    out_QD[:] = 0
    for i in range(num_seen):
        if i + _AHEAD < num_seen:
            _prefetch(values_SKD, slot_L[i + _AHEAD])
        values_KD = values_SKD[slot_L[i]]
        for q in range(out_QD.shape[0]):
            value_D, out_D, weight = values_KD[q // num_shared], out_QD[q], weight_QL[q, i]
            for d in range(value_D.size):
                out_D[d] += weight * value_D[d]


def _attend(heads_NAD: Floats, rotation: Pair, cache: Pair, places: Ints, scale: np.float32, out_NQD: Floats) -> None:
    """Compute softmax(scale q k) v of each row's queries, which are rotated here, over the row's pages."""
    num_heads, width = out_NQD.shape[1:]
    longest = places[:, 1].max() + 1
    query_QD = np.empty((num_heads, width), np.float32)
    weight_QL = np.empty((num_heads, longest), np.float32)
    slot_L = np.empty(longest, np.int64)
    for n in range(heads_NAD.shape[0]):
        num_seen = _slots(places[n], slot_L)
        for q in range(num_heads):
            _rotate(heads_NAD[n, q], rotation[0][n], rotation[1][n], query_QD[q])
        _score(query_QD, cache[0], slot_L[:num_seen], scale, weight_QL)
        for q in range(num_heads):
            _softmax(weight_QL[q], num_seen)
        _weigh(weight_QL, cache[1], slot_L[:num_seen], out_NQD[n])
