"""The loops of `fused_decode`, as numba compiles them: without the GIL, and cached on disk for the machine.

The functions here are the source; they are not called as Python. Sums may be taken in any order, so that LLVM
vectorizes them; numbers that are not finite stay so. Shapes: N rows, H hidden size, Q query heads, K heads of keys and
values, A all of them (queries, keys, values), D width of a head, R of it that is rotated, S slots of the pool, L
positions that a row sees, P pages of the longest row. `rotation` is cosines and sines [N, R], `cache` keys and values
[S, K, D], `places` [N, 2 + P] of each row the first position that it sees, its own, and the pages of them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from swarm_compression.compiled import compiled

from swarm.serving.model.batch import PAGE_TOKENS

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Pair = tuple[Floats, Floats]

_PAGE = PAGE_TOKENS
_FLAGS = {"reassoc", "contract", "arcp", "nsz"}

_AHEAD = 4
"""Positions whose keys or values are asked for before they are read. A processor reads ahead by itself, but not from
one page of 4 KiB into the next, and a position takes half of one or more."""

_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class FusedKernels:
    add_norm: Callable[[Floats, Floats, Floats, float, Floats], None]
    remember: Callable[[Floats, Pair, Pair, Ints], None]
    attend: Callable[[Floats, Pair, Pair, Ints, float, Floats], None]


def load() -> FusedKernels:
    """Compile, or take from numba's cache. ImportError where numba cannot be used."""
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
    """Ask for the memory of `array[index]`, without waiting for it. The compiler's own, for which numba has no name."""


def _overload_prefetch() -> None:
    """Have what is compiled call the intrinsic."""
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
                # to be read, soon again, as data
                builder.call(prefetch, [builder.gep(row, [offset]), number(0), number(3), number(1)])
            return context.get_dummy_value()

        return types.void(array, index), generate

    def typed(array, index):  # type: ignore[no-untyped-def] # noqa: ARG001 (numba compares annotations, too)
        return lambda array, index: ask(array, index)  # noqa: PLW0108

    overload(_prefetch)(typed)


def _add_norm(hidden_NH: Floats, delta_NH: Floats, weight_H: Floats, eps: np.float32, out_NH: Floats) -> None:
    """Add `delta_NH` to `hidden_NH`, where it stays, and give its RMS norm."""
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
    """Write each row's keys, rotated, and values into its page. One that begins a page clears the rest of it: whole
    pages are read elsewhere, and what a sequence before has left there may not be finite."""
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
    """Write scale q k: all heads of a position together, so that memory is read in its order."""
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
    """Write the weighted sums of the values, in memory's order as `_score`."""
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
    """softmax(scale q k) v of each row's queries, rotated here, over what its pages hold."""
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
