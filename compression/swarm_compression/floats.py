"""The codecs that send each value as a little-endian float of its own: fp32, fp16 and bf16.

Rounding is to nearest, ties to even. Shapes: N values of a flat vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm_compression.codec import Data, check_finite, check_size, check_vector

_WIRE = {"fp32": (torch.float32, "<i4"), "fp16": (torch.float16, "<i2"), "bf16": (torch.bfloat16, "<i2")}
_BITS = {"<i4": torch.int32, "<i2": torch.int16}


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """`name` says the format. Exact for values the format holds; larger ones than it holds are a CodecError."""

    name: str

    def encoded_bytes(self, num_values: int) -> int:
        return num_values * _WIRE[self.name][0].itemsize

    def encode(self, x_N: Tensor) -> bytes:
        dtype, bits = _WIRE[self.name]
        wire_N = check_vector(x_N).to(dtype)
        check_finite(wire_N, f"a value is not finite, or larger than {self.name} can hold")
        return wire_N.view(_BITS[bits]).numpy().astype(bits, copy=False).tobytes()

    def decode(self, data: Data, num_values: int) -> Tensor:
        view = check_size(data, num_values, self.encoded_bytes(num_values))
        dtype, bits = _WIRE[self.name]
        # astype copies: the tensor owns its memory, and never aliases the caller's buffer
        bits_N = np.frombuffer(view, dtype=bits).astype(bits[1:])
        x_N = torch.from_numpy(bits_N).view(dtype).to(torch.float32)
        check_finite(x_N, "a value is not finite")
        return x_N
