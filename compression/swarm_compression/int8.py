"""int8 with one fp32 scale per block of 256 values: 1.0156 bytes a value.

Layout, little-endian: ceil(N / 256) fp32 scales, then N int8 codes. A block's scale is its largest magnitude / 127,
cut to 16 significant bits. A code has 7 bits, so code * scale is exact in fp32. From this follow:

- the bytes and the decoded values are the same on every machine: no product is rounded, so fusing the
  multiplication into an addition, as compilers and GPUs do, cannot change a result;
- |x - decoded| <= absmax / 254 plus rounding (1e-5 of it), if the block's absmax is at least 2^-100;
- decoded values encode to the same bytes again: encode(decode(encode(x))) == encode(x).

A code is x * (1 / scale), each operation rounded to fp32, then rounded to the nearest integer, ties to even. -0 becomes
0. A block with an absmax under 2^-100 becomes zeros, which includes denormals: all numbers used are normal, so that
machines that flush denormals agree with those that do not. NaN and infinities are refused. The absmax block format is
that of Dettmers et al. 2021 (arXiv 2110.02861, section 2) with linear instead of dynamic codes.

The loops are compiled by numba; vectors on a GPU are encoded by `int8_cuda`. Long vectors are split at block borders
over `torch.get_num_threads()` cores, without the GIL. No value depends on another block, so the split changes no byte.
This module owns the threads, which start when needed.

Compiling was chosen by measurement (tests/bench/test_bench_codecs.py): a fused loop reads and writes each value once,
eager torch needs five passes over a block, and torch.compile needs a C++ compiler, which volunteers do not have. numba
compiles the fused functions at the first use, and caches them on disk. They are written so that LLVM vectorizes them:
blocks are slices, so that no index can be negative, and the absmax is found among bit patterns, because a maximum of
floats must keep an order. Without `fastmath` LLVM neither reorders nor fuses, and IEEE 754 defines all operations to
the last bit, so the bytes are those of the same operations in numpy.

Shapes: N values, K blocks, C values of a block. The loops' arrays are native, contiguous and aligned.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_compression.codec import Codec, CodecError, Data, check_size
from swarm_compression.compiled import compiled

T = TypeVar("T")

Floats: TypeAlias = NDArray[np.float32]
Codes: TypeAlias = NDArray[np.int8]

BLOCK_VALUES = 256
MAX_CODE = 127
MIN_ABSMAX = 2.0**-100
SCALE_MASK = -256  # clears the 8 low bits of an fp32's 24 significant ones
# bit patterns of positive fp32 numbers have the same order as the numbers
MIN_SCALE_BITS = int(np.array(MIN_ABSMAX / MAX_CODE, dtype="<f4").view("<i4")) & SCALE_MASK
MAX_SCALE_BITS = int(np.array(np.finfo(np.float32).max / MAX_CODE, dtype="<f4").view("<i4")) & SCALE_MASK

_SLAB_BLOCKS = 1 << 7

CORE_VALUES = 1 << 18
"""Minimum values for each core: 0.1 ms of work. With fewer, waking a thread costs more than it saves."""

_B = BLOCK_VALUES
_MAX_CODE = np.float32(MAX_CODE)
_MASK = np.int32(SCALE_MASK)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_MIN_SCALE_BITS = np.int32(MIN_SCALE_BITS)
_MAX_SCALE_BITS = np.int32(MAX_SCALE_BITS)
_MIN_ABSMAX_BITS = np.float32(MIN_ABSMAX).view(np.int32)
# adding and subtracting 1.5 * 2^23 rounds numbers under 2^22 to the nearest integer, ties to even, vectorized
_ROUND = np.float32(1.5 * 2**23)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled loops."""

    quantize: Callable[[Floats, Floats, Codes], bool]
    """(x_N, scale_K, code_N): write scales and codes. Return False if a value is not finite; what is written is then
    undefined."""
    dequantize: Callable[[Codes, Floats, Floats], None]
    """(code_N, scale_K, x_N): write values."""
    accumulate: Callable[[Codes, Floats, np.float32, Floats], None]
    """(code_N, scale_K, weight, acc_N): add weight * (code * scale), each operation rounded to fp32."""
    check: Callable[[NDArray[np.int32], Codes], tuple[bool, bool]]
    """(bits_K, code_N): return whether an encoder writes such scales, and whether it writes such codes."""


class Int8Codec(Codec):
    """The codec with one byte a value, and one scale for each block of 256 values."""

    def __init__(self) -> None:
        super().__init__("int8")

    @property
    def is_quick(self) -> bool:
        return bool(load_kernels.cache_info().currsize)  # does not wait for the compiler

    def encoded_bytes(self, num_values: int) -> int:
        return num_values + 4 * _num_blocks(num_values)

    def pieces(self, data: Data, num_values: int, start: int, stop: int) -> tuple[memoryview, ...]:
        view = check_size(data, num_values, self.encoded_bytes(num_values))
        codes = view[4 * _num_blocks(num_values) :]
        return view[4 * (start // BLOCK_VALUES) : 4 * _num_blocks(stop)], codes[start:stop]

    def combine(
        self, encoded: Sequence[Data], weights: Sequence[float], num_values: int, buffer: bytearray | memoryview
    ) -> None:
        # a slab's sum stays in the core's cache; besides it, only the scales need memory
        kernels = load_kernels()
        wires = [_split(np.frombuffer(data, dtype=np.uint8), num_values) for data in encoded]
        scale_K = np.empty(_num_blocks(num_values), dtype=np.float32)
        wire = np.frombuffer(check_size(buffer, num_values, self.encoded_bytes(num_values)), dtype=np.uint8)
        code_N = wire[scale_K.nbytes :].view(np.int8)
        sum_S = np.empty(min(num_values, _SLAB_BLOCKS * BLOCK_VALUES), dtype=np.float32)
        for start in range(0, scale_K.size, _SLAB_BLOCKS):
            blocks = slice(start, start + _SLAB_BLOCKS)
            values = slice(start * BLOCK_VALUES, min((start + _SLAB_BLOCKS) * BLOCK_VALUES, num_values))
            slab_S = sum_S[: values.stop - values.start]
            slab_S.fill(0)
            for (bits_K, codes_N), weight in zip(wires, weights, strict=True):
                kernels.accumulate(codes_N[values], bits_K[blocks].view(np.float32), np.float32(weight), slab_S)
            if not kernels.quantize(slab_S, scale_K[blocks], code_N[values]):
                raise CodecError("a value is not finite")
        wire[: scale_K.nbytes].view("<f4")[:] = scale_K

    def _write(self, x_N: Tensor, wire: NDArray[np.uint8]) -> None:
        num_blocks = _num_blocks(x_N.numel())
        if x_N.is_cuda and has_triton():
            from swarm_compression.int8_cuda import quantize_on_gpu  # noqa: PLC0415 (triton may be missing)

            scale_K, finite = quantize_on_gpu(x_N, wire)
        else:
            scale_K = np.empty(num_blocks, dtype=np.float32)
            finite = _quantize(x_N.cpu().numpy(), scale_K, wire[4 * num_blocks :].view(np.int8))
        if not finite:
            raise CodecError("a value is not finite")
        wire[: 4 * num_blocks].view("<f4")[:] = scale_K

    def _check(self, wire: NDArray[np.uint8], num_values: int) -> float:
        return _largest(_checked(wire, num_values)[0])

    def _read(self, wire: NDArray[np.uint8], x_N: Tensor) -> float:
        scale_K, code_N = _checked(wire, x_N.numel())
        _dequantize(code_N, scale_K, x_N.numpy())
        return _largest(scale_K)

    def _accumulate(self, wire: NDArray[np.uint8], weight: np.float32, acc_N: Tensor) -> None:
        scale_K, code_N = _checked(wire, acc_N.numel())
        _accumulate(code_N, scale_K, weight, acc_N.numpy())


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK_VALUES)


def _largest(scale_K: NDArray[np.float32]) -> float:
    return MAX_CODE * float(scale_K.max(initial=0))


def _split(wire: NDArray[np.uint8], num_values: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
    """Return the scales' bits [K], aligned even if `wire` is not, and codes [N]."""
    num_scale_bytes = 4 * _num_blocks(num_values)
    return wire[:num_scale_bytes].view("<i4").astype(np.int32), wire[num_scale_bytes:].view(np.int8)


def _checked(wire: NDArray[np.uint8], num_values: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Return scales [K] and codes [N]. Raises CodecError for anything that no encoder writes: the code -128, and scales
    that are negative, not finite, below the minimum, or of over 16 significant bits."""
    bits_K, code_N = _split(wire, num_values)
    scales_are_sound, codes_are_sound = load_kernels().check(bits_K, code_N)
    if not scales_are_sound:
        raise CodecError("a scale is negative, not finite, or not one that an encoder writes")
    if not codes_are_sound:
        raise CodecError("-128 is not a code")
    return bits_K.view(np.float32), code_N


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed. Without it, vectors on a GPU are encoded on the CPU."""
    return importlib.util.find_spec("triton") is not None


def _fused_quantize(
    x_N: Floats, bits_N: NDArray[np.int32], scale_K: Floats, scale_bits_K: NDArray[np.int32], code_N: Codes
) -> bool:
    """Quantize in one pass. `bits_N` and `scale_bits_K` are views of the memory of `x_N` and `scale_K`."""
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


@functools.cache
def load_kernels() -> Kernels:
    """Compile the loops, or load them from numba's cache. Blocks for about a second the first time on a machine."""
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


def warm_up() -> None:
    """Compile the loops, so that the first `encode` and `decode` need not wait. Blocks: run it off the event loop."""
    load_kernels()


def _quantize(x_N: Floats, scale_K: Floats, code_N: Codes) -> bool:
    kernels = load_kernels()

    def cut(values: slice, blocks: slice) -> bool:
        return kernels.quantize(x_N[values], scale_K[blocks], code_N[values])

    return all(_on_cores(cut, x_N.size))


def _dequantize(code_N: Codes, scale_K: Floats, x_N: Floats) -> None:
    kernels = load_kernels()
    _on_cores(lambda values, blocks: kernels.dequantize(code_N[values], scale_K[blocks], x_N[values]), x_N.size)


def _accumulate(code_N: Codes, scale_K: Floats, weight: np.float32, acc_N: Floats) -> None:
    kernels = load_kernels()

    def cut(values: slice, blocks: slice) -> None:
        kernels.accumulate(code_N[values], scale_K[blocks], weight, acc_N[values])

    _on_cores(cut, acc_N.size)


def _on_cores(cut: Callable[[slice, slice], T], num_values: int) -> list[T]:
    """Run `cut(values, blocks)` over all of `num_values`, the last piece in the calling thread."""
    num_pieces = min(torch.get_num_threads(), num_values // CORE_VALUES)
    if num_pieces <= 1:
        return [cut(slice(None), slice(None))]
    num_blocks = _num_blocks(num_values)
    borders = [num_blocks * piece // num_pieces for piece in range(num_pieces + 1)]
    pieces = [
        (slice(start * BLOCK_VALUES, min(stop * BLOCK_VALUES, num_values)), slice(start, stop))
        for start, stop in itertools.pairwise(borders)
    ]
    others = [_threads(os.getpid()).submit(cut, *piece) for piece in pieces[:-1]]
    last = cut(*pieces[-1])
    return [*(other.result() for other in others), last]


@functools.lru_cache(maxsize=1)
def _threads(_pid: int) -> ThreadPoolExecutor:
    """Return the threads of this process. A forked process does not have those of its parent."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="int8")
