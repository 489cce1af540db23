"""Vectors for tests of codecs: drawn by hypothesis, and one that is the same on every machine."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

finite_values = st.floats(width=32, allow_nan=False, allow_infinity=False)

any_vectors = hnp.arrays(np.float32, st.integers(0, 700), elements=finite_values, fill=finite_values).map(
    torch.from_numpy
)
"""Anything finite: zeros, constants, denormals, the largest floats, lengths around the block size."""


def known_vector(num_values: int = 1000) -> Tensor:
    """Return a vector made from integers alone, over 40 binary orders of magnitude."""
    state = np.arange(1, num_values + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mantissa_N = (state >> np.uint64(40)).astype(np.int64) - (1 << 23)
    exponent_N = ((state >> np.uint64(32)) & np.uint64(0x1F)).astype(np.int32) - 40
    return torch.from_numpy(np.ldexp(mantissa_N.astype(np.float32), exponent_N))
