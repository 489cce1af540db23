"""The kernels of robust aggregation: trimmed means of coordinates, and scalar products among the members' vectors.

Pure functions that return the same bits on every machine. The trimmed mean only compares values, and adds them in
sorted order, with each product and sum rounded to fp64 on its own. So its result does not depend on the members' order.

A scalar product as a sum of rounded products would depend on the order in which a BLAS adds. So no product or sum
within a block is rounded: each block of each row is first scaled to whole numbers of at most 2^20 times a power of two,
and sums of 2^13 products of these are exact in fp64, in any order and with fused operations. The scaling changes
each value by at most 2^-20 of the block's largest magnitude.

Shapes: L leaves, M members, F values of a frame, V of a leaf, B of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Whole: TypeAlias = NDArray[np.int64]

N = TypeVar("N", bound=np.generic)

WEIGHT_BITS = 28
"""Maximum bits of a weight: the weight then fits a sort key beside a value, and its product with an fp32 value is exact
in fp64."""

_CACHED_VALUES = 1 << 16  # in all members' blocks together, which stay in a core's cache during the whole sort
_LEAST_BLOCK = 1 << 10
_MAGNITUDE = np.int32(0x7FFFFFFF)
_WEIGHT_MASK = (1 << WEIGHT_BITS) - 1

_BITS = 20
_BLOCK_VALUES = 1 << 13
_LARGEST = np.finfo(np.float32).max


def median_cut(weight_M: Sequence[int]) -> int:
    """Return the weight to cut at each end so that the trimmed mean is the weighted median (the mean of the two middle
    values where there are two)."""
    return (sum(weight_M) - 1) // 2


def trimmed_mean(x_MF: Floats, weight_M: Sequence[int], cut: int) -> Floats:
    """Return for each column the weighted mean of the values that remain once `cut` of the weight is removed at each
    end [F].

    Weights are positive and below 2^28, and `cut` is less than half of their sum. A member at the edge of the cut
    counts with the rest of its weight. So members with a total weight of at most `cut` cannot move any coordinate
    beyond the others' range. `x_MF` must be finite. Memory beyond the result: a few blocks. Raises ValueError if
    nothing remains."""
    num_members, num_values = x_MF.shape
    if not 0 <= 2 * cut < sum(weight_M):
        raise ValueError(f"nothing is left if {cut} of {sum(weight_M)} is cut at each end")
    result_F = np.empty(num_values, dtype=np.float32)
    equal = len(set(weight_M)) == 1
    for block in blocks(num_values, max(_LEAST_BLOCK, _CACHED_VALUES // num_members)):
        if equal:
            rows = [row.copy() for row in x_MF[:, block]]
            _sort(rows)
            result_F[block] = _mean_of_ranks(rows, weight_M, cut)
        else:
            keys = [_keys(row, weight) for row, weight in zip(x_MF[:, block], weight_M, strict=True)]
            _sort(keys)
            result_F[block] = _mean_of_weights(keys, weight_M, cut)
    return result_F


def blocks(num_values: int, block_values: int) -> Iterator[slice]:
    """Yield slices of `block_values` that cover `num_values`."""
    for start in range(0, num_values, block_values):
        yield slice(start, min(start + block_values, num_values))


@lru_cache(maxsize=64)
def network(num_members: int) -> tuple[tuple[int, int], ...]:
    """Return the sorting network for `num_members` inputs: the pairs (low, high) to compare and exchange, in order
    (Batcher's merge exchange; Knuth, The Art of Computer Programming 3, section 5.2.2, algorithm M)."""
    pairs = list[tuple[int, int]]()
    top = 1 << max(0, (num_members - 1).bit_length() - 1)
    stride = top if num_members > 1 else 0
    while stride:
        merge, offset, distance = top, 0, stride
        while True:
            pairs += [(low, low + distance) for low in range(num_members - distance) if low & stride == offset]
            if merge == stride:
                break
            offset, distance, merge = stride, merge - stride, merge >> 1
        stride >>= 1
    return tuple(pairs)


def _sort(rows: list[NDArray[N]]) -> None:
    """Sort each column over `rows`, in place: row k then holds the k-th lowest values."""
    spare = np.empty_like(rows[0])
    for low, high in network(len(rows)):
        np.minimum(rows[low], rows[high], out=spare)
        np.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]


def _keys(row: Floats, weight: int) -> Whole:
    """Return whole numbers that sort by the values, and by the weight where values are equal."""
    bits_B = row.view(np.int32)
    keys_B: Whole = (bits_B ^ ((bits_B >> 31) & _MAGNITUDE)).astype(np.int64)
    keys_B <<= WEIGHT_BITS
    keys_B |= weight
    return keys_B


def _values(keys_B: Whole) -> Floats:
    bits_B = (keys_B >> WEIGHT_BITS).astype(np.int32)
    return (bits_B ^ ((bits_B >> 31) & _MAGNITUDE)).view(np.float32)


def _mean_of_ranks(rows: list[Floats], weight_M: Sequence[int], cut: int) -> Doubles:
    """Return the trimmed mean of sorted `rows` with equal weights: each rank has one weight in all columns."""
    total, below = sum(weight_M), 0
    sum_B = np.zeros(rows[0].shape)
    for row, weight in zip(rows, weight_M, strict=True):
        kept = min(below + weight, total - cut) - max(below, cut)
        below += weight
        if kept > 0:
            sum_B += row.astype(np.float64) * kept
    sum_B /= total - 2 * cut
    return sum_B


def _mean_of_weights(rows: list[Whole], weight_M: Sequence[int], cut: int) -> Doubles:
    """Return the trimmed mean of `rows`, which are sorted keys."""
    total, ascending = sum(weight_M), sorted(weight_M)
    below_B, kept_B = np.zeros_like(rows[0]), np.empty_like(rows[0])
    sum_B, product_B = np.zeros(rows[0].shape), np.empty(rows[0].shape)
    for rank, keys_B in enumerate(rows):
        if sum(ascending[:rank]) >= total - cut:
            break  # whichever members are below, this rank and all higher ones are cut
        edge_B = np.maximum(below_B, cut, out=kept_B)
        below_B += keys_B & _WEIGHT_MASK
        if sum(ascending[-rank - 1 :]) <= cut:
            continue  # whichever members are below, everything up to this rank is cut
        np.subtract(np.minimum(below_B, total - cut), edge_B, out=kept_B)
        np.maximum(kept_B, 0, out=kept_B)
        np.multiply(_values(keys_B), kept_B, out=product_B)
        sum_B += product_B
    sum_B /= total - 2 * cut
    return sum_B


def products(x_LMV: Floats) -> Doubles:
    """Return the scalar products x_i * x_j for all pairs of members of each leaf [L, M, M], in fp64, added block by
    block. `x_LMV` must be finite, and need not be contiguous."""
    num_leaves, num_members, num_values = x_LMV.shape
    sum_LMM = np.zeros((num_leaves, num_members, num_members))
    for block in blocks(num_values, _BLOCK_VALUES):
        whole_LMB, exponent_LM = _whole(x_LMV[:, :, block])
        exponent_LMM = exponent_LM[:, :, None] + exponent_LM[:, None, :]
        sum_LMM += np.ldexp(whole_LMB @ whole_LMB.transpose(0, 2, 1), exponent_LMM)
    return sum_LMM


def squares(x_LV: Floats) -> Doubles:
    """Return the scalar product x * x of each leaf [L], with the same bits as `products`."""
    sum_L = np.zeros(len(x_LV))
    for block in blocks(x_LV.shape[1], _BLOCK_VALUES):
        whole_LB, exponent_L = _whole(x_LV[:, block])
        sum_L += np.ldexp((whole_LB * whole_LB).sum(axis=1), 2 * exponent_L)  # exact, as no sum needs rounding
    return sum_L


def ordered_sum(x_LM: Doubles) -> Doubles:
    """Return the sum of each row [L], added in the order of M, with each partial sum rounded to fp64."""
    sum_L = np.zeros(x_LM.shape[:-1])
    for x_L in np.moveaxis(x_LM, -1, 0):
        sum_L += x_L
    return sum_L


def matrix_product(a_LKM: Doubles, b_LMN: Doubles) -> Doubles:
    """Return a @ b [..., K, N] for small matrices, with or without a leading dimension of leaves. Products are added in
    the order of M, with each product and sum rounded to fp64."""
    sum_LKN = np.zeros((*a_LKM.shape[:-1], b_LMN.shape[-1]))
    for member in range(a_LKM.shape[-1]):
        sum_LKN += a_LKM[..., :, member, None] * b_LMN[..., member, None, :]
    return sum_LKN


def squared_distances(products_LMM: Doubles) -> Doubles:
    """Return |x_i - x_j|^2 for all pairs [..., M, M], from their scalar products."""
    own_LM = diagonal(products_LMM)
    return np.maximum(own_LM[..., :, None] + own_LM[..., None, :] - 2 * products_LMM, 0.0)


def diagonal(x_LMM: Doubles) -> Doubles:
    return np.diagonal(x_LMM, axis1=-2, axis2=-1)


def centred(x_MF: Floats, centre_F: Floats) -> Floats:
    """Subtract `centre_F` from `x_MF` in place, clip to fp32's range, and return `x_MF`."""
    with np.errstate(over="ignore"):
        np.subtract(x_MF, centre_F, out=x_MF)
    return np.clip(x_MF, -_LARGEST, _LARGEST, out=x_MF)


def _whole(x_LMB: Floats) -> tuple[Doubles, Whole]:
    """Return whole numbers of at most 2^20, and the power of two [L, M] by which to multiply each row."""
    largest_LM = np.maximum(x_LMB.max(axis=-1), -x_LMB.min(axis=-1)).astype(np.float64)
    exponent_LM = np.frexp(largest_LM)[1].astype(np.int64) - _BITS
    whole_LMB = x_LMB * np.ldexp(1.0, -exponent_LM)[..., None]
    return np.rint(whole_LMB, out=whole_LMB), exponent_LM
