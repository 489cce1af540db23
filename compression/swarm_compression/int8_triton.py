"""The Triton source of `int8_cuda`, alone in a module because Triton must be there when it is read.

Shapes: C values of a block; one program for each block.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from swarm_compression import int8_kernels

# what a kernel reads of its module has to be of this type
_BLOCK_VALUES = tl.constexpr(int8_kernels.BLOCK_VALUES)
_MAX_CODE = tl.constexpr(float(int8_kernels.MAX_CODE))
_SCALE_MASK = tl.constexpr(int8_kernels.SCALE_MASK)
_MIN_ABSMAX_BITS = tl.constexpr(int(np.float32(int8_kernels.MIN_ABSMAX).view(np.int32)))
_INFINITY = tl.constexpr(0x7F800000)
_ROUND = tl.constexpr(1.5 * 2**23)


@triton.jit
def quantize_block(x_ptr, scale_ptr, code_ptr, num_values):
    block = tl.program_id(0)
    place_C = block.to(tl.int64) * _BLOCK_VALUES + tl.arange(0, _BLOCK_VALUES)
    inside_C = place_C < num_values
    x_C = tl.load(x_ptr + place_C, mask=inside_C, other=0.0)
    # among bit patterns, because a maximum of floats passes over NaN
    absmax_bits = tl.max(x_C.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    unscaled = tl.div_rn(absmax_bits.to(tl.float32, bitcast=True), _MAX_CODE)
    used = absmax_bits >= _MIN_ABSMAX_BITS
    scale = tl.where(used, unscaled.to(tl.int32, bitcast=True) & _SCALE_MASK, 0).to(tl.float32, bitcast=True)
    inverse = tl.where(used, tl.div_rn(1.0, tl.where(used, scale, 1.0)), 0.0)
    code_C = (x_C * inverse + _ROUND) - _ROUND
    tl.store(scale_ptr + block, tl.where(absmax_bits >= _INFINITY, float("inf"), scale))
    tl.store(code_ptr + place_C, code_C.to(tl.int8), mask=inside_C)
