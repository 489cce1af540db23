"""The face of a codec, and the checks that all codecs make before they look at a value.

Leaves the formats to `floats` and `int8`. Nothing here has state.
Shapes: N values of a flat vector.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Data: TypeAlias = bytes | bytearray | memoryview


class CodecError(ValueError):
    """A vector that cannot be encoded, or bytes that no encoder wrote."""


class Codec(Protocol):
    """Encodes a flat fp32 vector. The same vector gives the same bytes on every machine and device."""

    @property
    def name(self) -> str: ...

    def encoded_bytes(self, num_values: int) -> int:
        """The exact size of an encoded vector: it depends on nothing but `num_values`."""

    def encode(self, x_N: Tensor) -> bytes:
        """`x_N` is fp32, one-dimensional, on any device. Raises CodecError if it is not, or not finite."""

    def decode(self, data: Data, num_values: int) -> Tensor:
        """A new fp32 CPU tensor [num_values], all finite. Raises CodecError, before anything is allocated if the
        size is wrong."""


def check_vector(x_N: Tensor) -> Tensor:
    """`x_N`, contiguous, on the CPU and without its autograd history."""
    if x_N.dtype != torch.float32 or x_N.dim() != 1:
        raise CodecError(f"expected a flat float32 vector, got {tuple(x_N.shape)} of {x_N.dtype}")
    return x_N.detach().cpu().contiguous()


def check_finite(x_N: Tensor, message: str) -> None:
    # the extremes of a vector with a NaN are NaN
    if x_N.numel() and not all(math.isfinite(extreme) for extreme in torch.aminmax(x_N)):
        raise CodecError(message)


def check_size(data: Data, num_values: int, expected_bytes: int) -> memoryview:
    """`data` as a flat view of bytes, once its size is what `num_values` values need."""
    if num_values < 0:
        raise CodecError(f"a vector cannot have {num_values} values")
    view = memoryview(data)
    if view.nbytes != expected_bytes:
        raise CodecError(f"{num_values} values take {expected_bytes} bytes, got {view.nbytes}")
    if not view.c_contiguous:
        raise CodecError("the bytes are not contiguous")
    return view.cast("B")
