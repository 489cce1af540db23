"""The int8 loops as numba compiles them: each value read once and written once, a block at a time, without the GIL.

The functions here are the source; nobody calls them as Python. They are written so that LLVM makes vectors of them:
blocks are slices, so that no index can be negative, and the absmax is found among bit patterns, because a float's
maximum has an order to keep. Without `fastmath` LLVM neither reorders nor fuses, so that the bytes are those of
`int8_plain`. Shapes: N values, K blocks, C values a block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm_compression.compiled import compiled
from swarm_compression.int8_kernels import (
    BLOCK_VALUES,
    MAX_CODE,
    MAX_SCALE_BITS,
    MIN_ABSMAX,
    MIN_SCALE_BITS,
    SCALE_MASK,
    Codes,
    Floats,
    Kernels,
)

_B = BLOCK_VALUES
_MAX_CODE = np.float32(MAX_CODE)
_MASK = np.int32(SCALE_MASK)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_MIN_SCALE_BITS = np.int32(MIN_SCALE_BITS)
_MAX_SCALE_BITS = np.int32(MAX_SCALE_BITS)
_MIN_ABSMAX_BITS = np.float32(MIN_ABSMAX).view(np.int32)
# adding and subtracting 1.5 * 2^23 rounds what is under 2^22 to the nearest integer, ties to even, in vectors
_ROUND = np.float32(1.5 * 2**23)


def load() -> Kernels:
    """Compile, or take from numba's cache. ImportError where numba cannot be used."""
    import numba  # noqa: PLC0415 (a third of a second)

    types = numba.types
    floats, ints, codes = types.float32[::1], types.int32[::1], types.int8[::1]
    read_floats, read_ints, read_codes = (
        types.Array(array.dtype, 1, "C", readonly=True) for array in (floats, ints, codes)
    )
    two = types.UniTuple(types.boolean, 2)

    quantize = compiled(_quantize, types.boolean(read_floats, read_ints, floats, ints, codes))
    return Kernels(
        quantize=lambda x_N, scale_K, code_N: bool(
            quantize(x_N, x_N.view(np.int32), scale_K, scale_K.view(np.int32), code_N)
        ),
        dequantize=compiled(_dequantize, types.void(read_codes, read_floats, floats)),
        accumulate=compiled(_accumulate, types.void(read_codes, read_floats, types.float32, floats)),
        check=compiled(_check, two(read_ints, read_codes)),
    )


def _quantize(
    x_N: Floats, bits_N: NDArray[np.int32], scale_K: Floats, scale_bits_K: NDArray[np.int32], code_N: Codes
) -> bool:
    """`bits_N` and `scale_bits_K` are the memory of `x_N` and `scale_K`."""
    largest_bits = np.int32(0)
    for k in range(scale_K.size):
        x_C = x_N[k * _B : k * _B + _B]
        bits_C = bits_N[k * _B : k * _B + _B]
        code_C = code_N[k * _B : k * _B + _B]
        absmax_bits = np.int32(0)
        for c in range(x_C.size):
            absmax_bits = max(absmax_bits, bits_C[c] & _MAGNITUDE)
        largest_bits = max(largest_bits, absmax_bits)
        if absmax_bits < _MIN_ABSMAX_BITS:
            scale_bits_K[k] = 0
            inverse = np.float32(0)
        else:
            scale_bits_K[k] = absmax_bits
            scale_K[k] = scale_K[k] / _MAX_CODE
            scale_bits_K[k] &= _MASK
            inverse = np.float32(1) / scale_K[k]
        for c in range(x_C.size):
            code_C[c] = np.int8(np.int32((x_C[c] * inverse + _ROUND) - _ROUND))
    return bool(largest_bits < _INFINITY)


def _dequantize(code_N: Codes, scale_K: Floats, x_N: Floats) -> None:
    for k in range(scale_K.size):
        code_C = code_N[k * _B : k * _B + _B]
        x_C = x_N[k * _B : k * _B + _B]
        scale = scale_K[k]
        for c in range(x_C.size):
            x_C[c] = np.float32(code_C[c]) * scale


def _accumulate(code_N: Codes, scale_K: Floats, weight: np.float32, acc_N: Floats) -> None:
    for k in range(scale_K.size):
        code_C = code_N[k * _B : k * _B + _B]
        acc_C = acc_N[k * _B : k * _B + _B]
        scale = scale_K[k]
        for c in range(acc_C.size):
            acc_C[c] += weight * (np.float32(code_C[c]) * scale)


def _check(bits_K: NDArray[np.int32], code_N: Codes) -> tuple[bool, bool]:
    num_wrong = 0
    for k in range(bits_K.size):
        bits = bits_K[k]
        in_range = (bits >= _MIN_SCALE_BITS) & (bits <= _MAX_SCALE_BITS)
        num_wrong += not (((bits == 0) | in_range) & (bits & ~_MASK == 0))
    least = np.int8(0)
    for n in range(code_N.size):
        least = min(least, code_N[n])
    return num_wrong == 0, bool(least >= -MAX_CODE)
