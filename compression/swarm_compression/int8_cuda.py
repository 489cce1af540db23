"""The int8 encoder on an NVIDIA GPU, so that a quarter of the bytes cross to the CPU. Decoding happens on the CPU,
where parts are reduced.

The bytes are to be those of the CPU: every operation is one that IEEE 754 defines (`div_rn`, not Triton's approximate
division), and fusing is off, since multiplying and adding in a single rounding has other ties. Under Triton's
interpreter that holds, and compiled for sm_90 it has `div.rn` and no `fma`. On a GPU it has not been run yet: until
`tests/compression/test_int8_cuda.py` has passed on one, equal bytes are what this is written for and not a guarantee,
and there is no figure. Triton comes with torch's CUDA wheels for Linux; without it vectors are encoded on the CPU.

Shapes: N values, K blocks.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_compression.int8_kernels import BLOCK_VALUES, Floats


@functools.cache
def available() -> bool:
    return importlib.util.find_spec("triton") is not None


def quantize(x_N: Tensor, wire: NDArray[np.uint8]) -> tuple[Floats, bool]:
    """Write the codes at the end of `wire`. The scales [K], and whether all values are finite."""
    scale_K, code_N = launch(x_N)
    host_K = scale_K.cpu().numpy()
    if x_N.numel():
        wire[-x_N.numel() :] = code_N.cpu().numpy().view(np.uint8)
    return host_K, bool(np.isfinite(host_K).all())


def launch(x_N: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [K], infinite for a block with a value that is not finite, and codes [N], on the device of `x_N`."""
    num_blocks = -(-x_N.numel() // BLOCK_VALUES)
    scale_K = torch.empty(num_blocks, dtype=torch.float32, device=x_N.device)
    code_N = torch.empty(x_N.numel(), dtype=torch.int8, device=x_N.device)
    if num_blocks:
        _kernel()[(num_blocks,)](
            x_N,
            scale_K,
            code_N,
            x_N.numel(),
            num_warps=2,
            enable_fp_fusion=False,
        )
    return scale_K, code_N


@functools.cache
def _kernel() -> Any:
    from swarm_compression.int8_triton import quantize_block  # noqa: PLC0415 (triton may be missing)

    return quantize_block
