"""int8 with one fp32 scale per block of 256 values: 1.0156 bytes a value.

Layout, little-endian: ceil(N / 256) fp32 scales, then N int8 codes. A block's scale is its largest magnitude / 127,
cut to 16 significant bits. A code has 7 bits, so code * scale is exact in fp32. From this follow:

- the bytes and the decoded values are the same on every machine: no product is rounded, so fusing the
  multiplication into an addition, as compilers and GPUs like to, cannot change a result;
- |x - decoded| <= absmax / 254 plus rounding (1e-5 of it), where the block's absmax is at least 2^-100;
- decoded values encode to the same bytes again: encode(decode(encode(x))) == encode(x).

A code is x * (1 / scale), each operation rounded to fp32, then rounded to the nearest integer, ties to even. -0 becomes
0. A block whose absmax is under 2^-100 becomes zeros, denormals among them: every number that matters is normal, so
that machines which flush denormals agree with those that do not. NaN and infinities are refused. The absmax block
format is that of Dettmers et al. 2021 (arXiv 2110.02861, section 2) with linear instead of dynamic codes.

The loops are `int8_kernels`' on the CPU and `int8_cuda`'s on a GPU. Long vectors are cut at block borders over as many
cores as `torch.get_num_threads()` says; the GIL is free meanwhile. No value depends on another block, so the cut
changes nothing. The threads, which start when needed, are this module's. Shapes: N values, K blocks.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_compression.codec import Codec, CodecError, Data, check_size
from swarm_compression.int8_kernels import BLOCK_VALUES, MAX_CODE, PLAIN, Codes, Floats, chosen

T = TypeVar("T")

_SLAB_BLOCKS = 1 << 7

CORE_VALUES = 1 << 18
"""The least that a core gets: 0.1 ms of work. Below that, waking a thread costs more than it brings."""


class Int8Codec(Codec):
    """Codec of one byte a value, and one scale for each block of 256 values."""

    def __init__(self) -> None:
        super().__init__("int8")

    @property
    def is_quick(self) -> bool:
        return bool(chosen.cache_info().currsize) and chosen() is not PLAIN  # never waits for the compiler

    def encoded_bytes(self, num_values: int) -> int:
        return num_values + 4 * _num_blocks(num_values)

    def pieces(self, data: Data, num_values: int, start: int, stop: int) -> tuple[memoryview, ...]:
        view = check_size(data, num_values, self.encoded_bytes(num_values))
        codes = view[4 * _num_blocks(num_values) :]
        return view[4 * (start // BLOCK_VALUES) : 4 * _num_blocks(stop)], codes[start:stop]

    def combine(
        self, encoded: Sequence[Data], weights: Sequence[float], num_values: int, buffer: bytearray | memoryview
    ) -> None:
        # a slab's sum stays in the core's cache, and is all the memory that this takes
        kernels = chosen()
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
    """Return the scales' bits [K], aligned, whatever `wire` is, and codes [N]."""
    num_scale_bytes = 4 * _num_blocks(num_values)
    return wire[:num_scale_bytes].view("<i4").astype(np.int32), wire[num_scale_bytes:].view(np.int8)


def _checked(wire: NDArray[np.uint8], num_values: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Return scales [K] and codes [N]. Refuse all that no encoder writes before a value is touched: scales that are
    negative, not finite, under the least or with over 16 significant bits, and the code -128."""
    bits_K, code_N = _split(wire, num_values)
    scales_are_sound, codes_are_sound = chosen().check(bits_K, code_N)
    if not scales_are_sound:
        raise CodecError("a scale is negative, not finite, or not one that an encoder writes")
    if not codes_are_sound:
        raise CodecError("-128 is not a code")
    return bits_K.view(np.float32), code_N


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed: without it vectors on a GPU are encoded on the CPU."""
    return importlib.util.find_spec("triton") is not None


def _quantize(x_N: Floats, scale_K: Floats, code_N: Codes) -> bool:
    kernels = chosen()

    def cut(values: slice, blocks: slice) -> bool:
        return kernels.quantize(x_N[values], scale_K[blocks], code_N[values])

    return all(_on_cores(cut, x_N.size))


def _dequantize(code_N: Codes, scale_K: Floats, x_N: Floats) -> None:
    kernels = chosen()
    _on_cores(lambda values, blocks: kernels.dequantize(code_N[values], scale_K[blocks], x_N[values]), x_N.size)


def _accumulate(code_N: Codes, scale_K: Floats, weight: np.float32, acc_N: Floats) -> None:
    kernels = chosen()

    def cut(values: slice, blocks: slice) -> None:
        kernels.accumulate(code_N[values], scale_K[blocks], weight, acc_N[values])

    _on_cores(cut, acc_N.size)


def _on_cores(cut: Callable[[slice, slice], T], num_values: int) -> list[T]:
    """Run `cut(values, blocks)` over all of `num_values`, the last piece on the calling thread."""
    num_pieces = min(torch.get_num_threads(), num_values // CORE_VALUES)
    if num_pieces <= 1:
        return [cut(slice(None), slice(None))]
    num_blocks = -(-num_values // BLOCK_VALUES)
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
    """Return the threads of this process: those of the process that it was forked from do not exist in it."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="int8")
