"""The int8 loops on the CPU: compiled by numba where it is there, else the same values by torch and numpy.

Chosen by measurement (tests/bench/test_bench_codecs.py): a fused loop reads and writes each value once, eager torch
needs five passes over a block, and torch.compile needs a C++ compiler, which volunteers do not have. The fused
functions are only the source of what numba compiles, at the first use and cached on disk. They are written so that LLVM
vectorizes them: blocks are slices, so that no index can be negative, and the absmax is found among bit patterns,
because a float's maximum has an order to keep. Without `fastmath` LLVM neither reorders nor fuses, so both ways give
the same bytes, by operations that IEEE 754 defines to the last bit. The plain loops work in slabs that stay in a core's
cache: three times the speed of one pass over everything.

Shapes: N values, S values of a slab, K blocks of 256 values (the last may be short), C values of a block. Arrays are
native, contiguous and aligned.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_compression.compiled import compiled

logger = logging.getLogger(__name__)

BLOCK_VALUES = 256
MAX_CODE = 127
MIN_ABSMAX = 2.0**-100
SCALE_MASK = -256  # clears the 8 low bits of an fp32's 24 significant ones
# the bit patterns of positive fp32 numbers are ordered as the numbers are
MIN_SCALE_BITS = int(np.array(MIN_ABSMAX / MAX_CODE, dtype="<f4").view("<i4")) & SCALE_MASK
MAX_SCALE_BITS = int(np.array(np.finfo(np.float32).max / MAX_CODE, dtype="<f4").view("<i4")) & SCALE_MASK

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

_SLAB_BLOCKS = 1 << 9

Floats: TypeAlias = NDArray[np.float32]
Codes: TypeAlias = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loops of int8 on one kind of processor."""

    quantize: Callable[[Floats, Floats, Codes], bool]
    """(x_N, scale_K, code_N): write scales and codes; False, with anything written, where a value is not finite."""
    dequantize: Callable[[Codes, Floats, Floats], None]
    """(code_N, scale_K, x_N): write values."""
    accumulate: Callable[[Codes, Floats, np.float32, Floats], None]
    """(code_N, scale_K, weight, acc_N): add weight * (code * scale), each operation rounded to fp32 by itself."""
    check: Callable[[NDArray[np.int32], Codes], tuple[bool, bool]]
    """(bits_K, code_N): whether the scales with these bits, and the codes, are all such as an encoder writes."""


def _fused_quantize(
    x_N: Floats, bits_N: NDArray[np.int32], scale_K: Floats, scale_bits_K: NDArray[np.int32], code_N: Codes
) -> bool:
    """Quantize in one pass. `bits_N` and `scale_bits_K` are the memory of `x_N` and `scale_K`."""
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


def _fused_dequantize(code_N: Codes, scale_K: Floats, x_N: Floats) -> None:
    for k in range(scale_K.size):
        code_C = code_N[k * _B : k * _B + _B]
        x_C = x_N[k * _B : k * _B + _B]
        scale = scale_K[k]
        for c in range(x_C.size):
            x_C[c] = np.float32(code_C[c]) * scale


def _fused_accumulate(code_N: Codes, scale_K: Floats, weight: np.float32, acc_N: Floats) -> None:
    for k in range(scale_K.size):
        code_C = code_N[k * _B : k * _B + _B]
        acc_C = acc_N[k * _B : k * _B + _B]
        scale = scale_K[k]
        for c in range(acc_C.size):
            acc_C[c] += weight * (np.float32(code_C[c]) * scale)


def _fused_check(bits_K: NDArray[np.int32], code_N: Codes) -> tuple[bool, bool]:
    num_wrong = 0
    for k in range(bits_K.size):
        bits = bits_K[k]
        in_range = (bits >= _MIN_SCALE_BITS) & (bits <= _MAX_SCALE_BITS)
        num_wrong += not (((bits == 0) | in_range) & (bits & ~_MASK == 0))
    least = np.int8(0)
    for n in range(code_N.size):
        least = min(least, code_N[n])
    return num_wrong == 0, bool(least >= -MAX_CODE)


def load_fused() -> Kernels:
    """Compile, or take from numba's cache. ImportError where numba cannot be used."""
    import numba  # noqa: PLC0415 (a third of a second)

    types = numba.types
    floats, ints, codes = types.float32[::1], types.int32[::1], types.int8[::1]
    read_floats, read_ints, read_codes = (
        types.Array(array.dtype, 1, "C", readonly=True) for array in (floats, ints, codes)
    )
    two = types.UniTuple(types.boolean, 2)

    quantize = compiled(_fused_quantize, types.boolean(read_floats, read_ints, floats, ints, codes))
    return Kernels(
        quantize=lambda x_N, scale_K, code_N: bool(
            quantize(x_N, x_N.view(np.int32), scale_K, scale_K.view(np.int32), code_N)
        ),
        dequantize=compiled(_fused_dequantize, types.void(read_codes, read_floats, floats)),
        accumulate=compiled(_fused_accumulate, types.void(read_codes, read_floats, types.float32, floats)),
        check=compiled(_fused_check, two(read_ints, read_codes)),
    )


def _plain_quantize(x_N: Floats, scale_K: Floats, code_N: Codes) -> bool:
    return all(
        _plain_quantize_slab(torch.from_numpy(x_N[values]), torch.from_numpy(scale_K[blocks]), code_N[values])
        for values, blocks in _slabs(x_N.size)
    )


def _plain_quantize_slab(x_S: Tensor, scale_K: Tensor, code_S: Codes) -> bool:
    if gap := -x_S.numel() % BLOCK_VALUES:
        x_S = torch.nn.functional.pad(x_S, (0, gap))  # zeros change neither absmax nor codes
    x_KC = x_S.view(-1, BLOCK_VALUES)
    work_KC = torch.abs(x_KC)
    absmax_K = work_KC.amax(dim=1)
    if not bool(torch.isfinite(absmax_K).all()):
        return False
    absmax_K = torch.where(absmax_K < MIN_ABSMAX, 0.0, absmax_K)
    scale_K.copy_((absmax_K / MAX_CODE).view(torch.int32).bitwise_and_(SCALE_MASK).view(torch.float32))
    inverse_K = torch.where(scale_K > 0, scale_K.reciprocal(), 0.0)
    torch.mul(x_KC, inverse_K.unsqueeze(1), out=work_KC).round_()
    torch.from_numpy(code_S).copy_(work_KC.view(-1)[: code_S.size])
    return True


def _plain_dequantize(code_N: Codes, scale_K: Floats, x_N: Floats) -> None:
    for values, blocks in _slabs(x_N.size):
        np.copyto(x_N[values], code_N[values])
        _scale_slab(x_N[values], scale_K[blocks])


def _plain_accumulate(code_N: Codes, scale_K: Floats, weight: np.float32, acc_N: Floats) -> None:
    for values, blocks in _slabs(acc_N.size):
        product_S = code_N[values].astype(np.float32)
        _scale_slab(product_S, scale_K[blocks])
        np.multiply(product_S, weight, out=product_S)
        np.add(acc_N[values], product_S, out=acc_N[values])


def _plain_check(bits_K: NDArray[np.int32], code_N: Codes) -> tuple[bool, bool]:
    in_range_K = (bits_K >= MIN_SCALE_BITS) & (bits_K <= MAX_SCALE_BITS)
    sound_K = ((bits_K == 0) | in_range_K) & (bits_K & ~SCALE_MASK == 0)
    return bool(sound_K.all()), not code_N.size or bool(code_N.min() >= -MAX_CODE)


def _scale_slab(x_S: Floats, scale_K: Floats) -> None:
    num_whole = x_S.size // BLOCK_VALUES
    whole_KC = x_S[: num_whole * BLOCK_VALUES].reshape(-1, BLOCK_VALUES)
    np.multiply(whole_KC, scale_K[:num_whole, None], out=whole_KC)
    x_S[num_whole * BLOCK_VALUES :] *= scale_K[num_whole:]


def _slabs(num_values: int) -> Iterator[tuple[slice, slice]]:
    for block in range(0, -(-num_values // BLOCK_VALUES), _SLAB_BLOCKS):
        start = block * BLOCK_VALUES
        yield (slice(start, min(start + _SLAB_BLOCKS * BLOCK_VALUES, num_values)), slice(block, block + _SLAB_BLOCKS))


PLAIN = Kernels(
    quantize=_plain_quantize, dequantize=_plain_dequantize, accumulate=_plain_accumulate, check=_plain_check
)


@functools.cache
def chosen() -> Kernels:
    """Return the fastest loops that this machine has. Blocks for about a second the first time on a machine."""
    try:
        return load_fused()
    except ImportError as error:
        logger.warning("int8 is 2 to 3 times slower here than it could be, because numba cannot be used: %s", error)
        return PLAIN


def warm_up() -> None:
    """Compile what the first `encode` and `decode` would otherwise wait for. Blocks: run it off the event loop."""
    chosen()
