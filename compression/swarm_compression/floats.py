"""The codecs that send each value as a little-endian float of its own: fp32, fp16 and bf16.

Rounding is to nearest, ties to even; -0 and denormals are kept as far as the format holds them. The relative error of
a value in the format's normal range is at most 2^-11 (fp16) and 2^-8 (bf16), and none in fp32.

Shapes: N values of a flat vector.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_compression.codec import Codec, check_finite

_WIRE = {"fp32": (torch.float32, "<i4"), "fp16": (torch.float16, "<i2"), "bf16": (torch.bfloat16, "<i2")}
_BITS = {"<i4": torch.int32, "<i2": torch.int16}


class FloatCodec(Codec):
    """`name` says the format. Exact for values the format holds; larger ones than it holds are a CodecError."""

    def encoded_bytes(self, num_values: int) -> int:
        return num_values * _WIRE[self.name][0].itemsize

    def _write(self, x_N: Tensor, wire: NDArray[np.uint8]) -> None:
        dtype, bits = _WIRE[self.name]
        wire_N = x_N.to(dtype).cpu()
        check_finite(wire_N, f"a value is not finite, or larger than {self.name} can hold")
        wire.view(bits)[:] = wire_N.view(_BITS[bits]).numpy()

    def _check(self, wire: NDArray[np.uint8], num_values: int) -> float:  # noqa: ARG002
        return self._checked(wire)[1]

    def _read(self, wire: NDArray[np.uint8], x_N: Tensor) -> float:
        wire_N, largest = self._checked(wire)
        x_N.copy_(wire_N)
        return largest

    def _checked(self, wire: NDArray[np.uint8]) -> tuple[Tensor, float]:
        """The values [N], all finite, in the format's own type, and their magnitude."""
        dtype, bits = _WIRE[self.name]
        # astype copies: torch takes neither foreign byte orders nor memory that is read-only or not aligned
        wire_N = torch.from_numpy(wire.view(bits).astype(bits[1:])).view(dtype)
        return wire_N, check_finite(wire_N, "a value is not finite")
