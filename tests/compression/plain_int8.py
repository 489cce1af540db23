"""The int8 loops in torch and numpy, written independently of the compiled ones of `swarm_compression.int8`, whose
values they must give.

They work in slabs that stay in a core's cache, three times as fast as one pass over everything.

Shapes: N values, S values of a slab, K blocks of 256 values (the last may be short), C values of a block. Arrays are
native, contiguous and aligned.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_compression.int8 import (
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
from torch import Tensor

_SLAB_BLOCKS = 1 << 9


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
