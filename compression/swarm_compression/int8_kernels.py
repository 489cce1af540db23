"""What the int8 loops are, and the numbers of the format that they share.

Shapes: N values, K blocks of 256 of which the last may be short. Arrays are native, contiguous and aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BLOCK_VALUES = 256
MAX_CODE = 127
MIN_ABSMAX = 2.0**-100
SCALE_MASK = -256  # clears the 8 low bits of an fp32's 24 significant ones
# the bit patterns of positive fp32 numbers are ordered as the numbers are
MIN_SCALE_BITS = int(np.array(MIN_ABSMAX / MAX_CODE, dtype="<f4").view("<i4")) & SCALE_MASK
MAX_SCALE_BITS = int(np.array(np.finfo(np.float32).max / MAX_CODE, dtype="<f4").view("<i4")) & SCALE_MASK

Floats: TypeAlias = NDArray[np.float32]
Codes: TypeAlias = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Kernels:
    quantize: Callable[[Floats, Floats, Codes], bool]
    """(x_N, scale_K, code_N): write scales and codes; False, with anything written, where a value is not finite."""
    dequantize: Callable[[Codes, Floats, Floats], None]
    """(code_N, scale_K, x_N): write values."""
    accumulate: Callable[[Codes, Floats, np.float32, Floats], None]
    """(code_N, scale_K, weight, acc_N): add weight * (code * scale), each operation rounded to fp32 by itself."""
    check: Callable[[NDArray[np.int32], Codes], tuple[bool, bool]]
    """(bits_K, code_N): whether the scales with these bits, and the codes, are all such as an encoder writes."""
