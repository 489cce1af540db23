"""Scalar products among members' vectors, block by block, with the same bits on every machine.

Leaves to others what follows from them. A sum of rounded products would depend on the order in which a BLAS adds, so
nothing is rounded: each block of each row is brought to whole numbers below 2^20 times a power of two, and sums of 2^13
products of those are exact in fp64, in any order and with fused operations. What is lost is 2^-21 of a block's largest
magnitude. Shapes: M members, F values of a frame, B values of a block.
"""

from __future__ import annotations

import numpy as np

from swarm.trust.aggregation.columns import Doubles, Floats, blocks

_BITS = 20
_BLOCK_VALUES = 1 << 13
_LARGEST = np.finfo(np.float32).max


def products(x_MF: Floats) -> Doubles:
    """x_i * x_j for all pairs of members [M, M], in fp64, by blocks in their order. `x_MF` must be finite."""
    num_members, num_values = x_MF.shape
    sum_MM = np.zeros((num_members, num_members))
    for block in blocks(num_values, _BLOCK_VALUES):
        whole_MB, exponent_M = _whole(x_MF[:, block])
        sum_MM += np.ldexp(whole_MB @ whole_MB.T, exponent_M[:, None] + exponent_M[None, :])
    return sum_MM


def square(x_F: Floats) -> float:
    """x * x, as `products` has it."""
    total = 0.0
    for block in blocks(x_F.size, _BLOCK_VALUES):
        whole_1B, exponent_1 = _whole(x_F[None, block])
        total += float(np.ldexp(whole_1B[0] @ whole_1B[0], 2 * exponent_1[0]))
    return total


def centred(x_MF: Floats, centre_F: Floats) -> Floats:
    """x - centre, in place, within fp32's range."""
    with np.errstate(over="ignore"):
        np.subtract(x_MF, centre_F, out=x_MF)
    return np.clip(x_MF, -_LARGEST, _LARGEST, out=x_MF)


def _whole(x_MB: Floats) -> tuple[Doubles, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Whole numbers of at most 2^20, and the power of two [M] that each row is to be multiplied by."""
    largest_M = np.maximum(x_MB.max(axis=1), -x_MB.min(axis=1)).astype(np.float64)
    exponent_M = np.frexp(largest_M)[1].astype(np.int64) - _BITS
    whole_MB = x_MB * np.ldexp(1.0, -exponent_M)[:, None]
    return np.rint(whole_MB, out=whole_MB), exponent_M
