"""The int8 loops on the CPU: fused by numba where it is there, else the same values by torch and numpy.

Chosen by measurement (tests/bench/test_bench_codecs.py): a fused loop reads and writes each value once, eager torch
needs five passes over a block, and torch.compile needs a C++ compiler, which volunteers do not have. Fused loops are
compiled at the first use, about a second, and cached on disk: `warm_up` does that at a time of the caller's choice.

Long vectors are cut at block borders over as many cores as `torch.get_num_threads()` says; the GIL is free meanwhile.
No value depends on another block, so the cut changes nothing. The threads, which start when needed, are this module's.

Shapes as in `int8_kernels`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from swarm_compression import int8_fused, int8_plain
from swarm_compression.int8_kernels import BLOCK_VALUES, Codes, Floats, Kernels

logger = logging.getLogger(__name__)

T = TypeVar("T")

CORE_VALUES = 1 << 18
"""The least that a core gets: 0.1 ms of work. Below that, waking a thread costs more than it brings."""


def quantize(x_N: Floats, scale_K: Floats, code_N: Codes) -> bool:
    kernels = chosen()

    def cut(values: slice, blocks: slice) -> bool:
        return kernels.quantize(x_N[values], scale_K[blocks], code_N[values])

    return all(_on_cores(cut, x_N.size))


def dequantize(code_N: Codes, scale_K: Floats, x_N: Floats) -> None:
    kernels = chosen()
    _on_cores(lambda values, blocks: kernels.dequantize(code_N[values], scale_K[blocks], x_N[values]), x_N.size)


def accumulate(code_N: Codes, scale_K: Floats, weight: np.float32, acc_N: Floats) -> None:
    kernels = chosen()

    def cut(values: slice, blocks: slice) -> None:
        kernels.accumulate(code_N[values], scale_K[blocks], weight, acc_N[values])

    _on_cores(cut, acc_N.size)


def check(bits_K: NDArray[np.int32], code_N: Codes) -> tuple[bool, bool]:
    return chosen().check(bits_K, code_N)


def is_quick() -> bool:
    """Whether the fused loops are ready: never waits for them to be compiled."""
    return bool(chosen.cache_info().currsize) and chosen() is not int8_plain.KERNELS


@functools.cache
def chosen() -> Kernels:
    """The fastest that this machine has. Blocks for a second the first time on a machine."""
    try:
        return int8_fused.load()
    except ImportError as error:
        logger.warning("int8 is 2 to 3 times slower here than it could be, because numba cannot be used: %s", error)
        return int8_plain.KERNELS


def warm_up() -> None:
    """Compile what the first `encode` and `decode` would otherwise wait for. Blocks: run it off the event loop."""
    chosen()


def _on_cores(cut: Callable[[slice, slice], T], num_values: int) -> list[T]:
    """`cut(values, blocks)` over all of `num_values`, the last piece on the calling thread."""
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
    """Of this process: those of the one it was forked from do not live on in it."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="int8")
