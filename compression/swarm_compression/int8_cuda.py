"""The int8 encoder on an NVIDIA GPU, so that a quarter of the bytes are copied to the CPU, which decodes and reduces.

The bytes should equal the CPU's: IEEE 754 defines every operation (`div_rn`, not Triton's approximate division), and
fusing is off, since a fused multiply-add rounds ties differently. The bytes are equal under Triton's interpreter, and
the code compiled for sm_90 has `div.rn` and no `fma`. It has not run on a GPU yet: until
`tests/compression/test_int8_cuda.py` has passed on one, equal bytes are not guaranteed, and the speed is not measured.
This module needs Triton, which comes with torch's CUDA wheels for Linux.

Shapes: N values, K blocks, C values of a block; one program for each block.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from swarm_compression.int8 import BLOCK_VALUES, MAX_CODE, MIN_ABSMAX, SCALE_MASK, Floats

# globals that a kernel reads must be of this type
_BLOCK_VALUES = tl.constexpr(BLOCK_VALUES)
_MAX_CODE = tl.constexpr(float(MAX_CODE))
_SCALE_MASK = tl.constexpr(SCALE_MASK)
_MIN_ABSMAX_BITS = tl.constexpr(int(np.float32(MIN_ABSMAX).view(np.int32)))
_INFINITY = tl.constexpr(0x7F800000)
_ROUND = tl.constexpr(1.5 * 2**23)


@triton.jit
def _quantize_block(x_ptr, scale_ptr, code_ptr, num_values):
    block = tl.program_id(0)
    place_C = block.to(tl.int64) * _BLOCK_VALUES + tl.arange(0, _BLOCK_VALUES)
    inside_C = place_C < num_values
    x_C = tl.load(x_ptr + place_C, mask=inside_C, other=0.0)
    # among bit patterns, because a maximum of floats ignores NaN
    absmax_bits = tl.max(x_C.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    unscaled = tl.div_rn(absmax_bits.to(tl.float32, bitcast=True), _MAX_CODE)
    used = absmax_bits >= _MIN_ABSMAX_BITS
    scale = tl.where(used, unscaled.to(tl.int32, bitcast=True) & _SCALE_MASK, 0).to(tl.float32, bitcast=True)
    inverse = tl.where(used, tl.div_rn(1.0, tl.where(used, scale, 1.0)), 0.0)
    code_C = (x_C * inverse + _ROUND) - _ROUND
    tl.store(scale_ptr + block, tl.where(absmax_bits >= _INFINITY, float("inf"), scale))
    tl.store(code_ptr + place_C, code_C.to(tl.int8), mask=inside_C)


def quantize_on_gpu(x_N: Tensor, wire: NDArray[np.uint8]) -> tuple[Floats, bool]:
    """Write the codes at the end of `wire`; return the scales [K], and whether all values are finite."""
    scale_K, code_N = _launch(x_N)
    host_K = scale_K.cpu().numpy()
    if x_N.numel():
        wire[-x_N.numel() :] = code_N.cpu().numpy().view(np.uint8)
    return host_K, bool(np.isfinite(host_K).all())


def _launch(x_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales [K] (infinite for a block with a value that is not finite) and codes [N], on the device of
    `x_N`."""
    num_blocks = -(-x_N.numel() // BLOCK_VALUES)
    scale_K = torch.empty(num_blocks, dtype=torch.float32, device=x_N.device)
    code_N = torch.empty(x_N.numel(), dtype=torch.int8, device=x_N.device)
    if num_blocks:
        _quantize_block[(num_blocks,)](x_N, scale_K, code_N, x_N.numel(), num_warps=2, enable_fp_fusion=False)
    return scale_K, code_N
