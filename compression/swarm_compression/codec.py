"""The interface of a codec, the checks that every codec makes before it reads a value, and the float codecs.

The float codecs (fp32, fp16, bf16) write each value as one little-endian float, rounded to nearest, ties to even. -0
and denormals are kept as far as the format can represent them. The relative error of a value in the format's normal
range is at most 2^-11 (fp16) and 2^-8 (bf16); fp32 has none. The other formats are in `int8` and `four_bits`. No state.

Shapes: N values of a flat vector.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Data: TypeAlias = bytes | bytearray | memoryview

_WIRE = {"fp32": (torch.float32, "<i4"), "fp16": (torch.float16, "<i2"), "bf16": (torch.bfloat16, "<i2")}

_BITS = {"<i4": torch.int32, "<i2": torch.int16}

CUT_VALUES = 256
"""Encoded vectors can be cut at multiples of this number of values, where blocks of all codecs end."""


class CodecError(ValueError):
    """A vector that cannot be encoded, or bytes that no encoder wrote."""


class Codec(ABC):
    """Encodes flat fp32 vectors. The same vector gives the same bytes on every machine and device, with any number of
    threads; NaN and infinities are refused both ways.

    The public methods check their arguments. A codec implements `encoded_bytes`, `_write`, `_check` and `_read`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def encoded_bytes(self, num_values: int) -> int:
        """Return the exact size of an encoded vector, which depends only on `num_values`."""

    def pieces(self, data: Data, num_values: int, start: int, stop: int) -> tuple[memoryview, ...]:
        """Return the pieces of `data`, an encoded vector, that together encode its values [start, stop). `start` and
        `stop` are multiples of CUT_VALUES; `stop` may also be the vector's end. Raises CodecError if the size is
        wrong."""
        view = check_size(data, num_values, self.encoded_bytes(num_values))
        value_bytes = self.encoded_bytes(1)
        return (view[start * value_bytes : stop * value_bytes],)

    @property
    def is_quick(self) -> bool:
        """True if values on the CPU are encoded and decoded at 5 GB/s or more on one core.

        Then 100,000 values take less time than a handover to another thread and back.
        """
        return False

    def encode(self, x_N: Tensor) -> bytes:
        """Encode `x_N`: fp32, one-dimensional, on any device. Raises CodecError otherwise, and if it is not finite."""
        wire = np.empty(self.encoded_bytes(x_N.numel()), dtype=np.uint8)
        self._write(check_vector(x_N), wire)
        return wire.tobytes()

    def encode_into(self, x_N: Tensor, buffer: bytearray | memoryview) -> None:
        """Write the bytes of `encode` to `buffer`, whose size must be exact. After a CodecError its contents are
        undefined."""
        x_N = check_vector(x_N)
        view = check_size(buffer, x_N.numel(), self.encoded_bytes(x_N.numel()))
        if view.readonly:
            raise CodecError("the buffer cannot be written to")
        self._write(x_N, np.frombuffer(view, dtype=np.uint8))

    def check(self, data: Data, num_values: int) -> float:
        """Return an upper bound of the decoded magnitude; for an encoder's bytes it is at most 1.2 times too large.
        Raises CodecError if `decode` would, at a fraction of its cost: no value is decoded."""
        view = check_size(data, num_values, self.encoded_bytes(num_values))
        return self._check(np.frombuffer(view, dtype=np.uint8), num_values)

    def decode(self, data: Data, num_values: int) -> Tensor:
        """Return a new fp32 CPU tensor [num_values], all finite. Raises CodecError; for a wrong size before it
        allocates memory."""
        view = check_size(data, num_values, self.encoded_bytes(num_values))
        x_N = torch.empty(num_values)
        self._read(np.frombuffer(view, dtype=np.uint8), x_N)
        return x_N

    def decode_into(self, data: Data, x_N: Tensor) -> float:
        """Decode into `x_N`, a contiguous fp32 CPU vector. Return the bound of `check`. After a CodecError `x_N` is
        undefined."""
        _check_writable(x_N)
        view = check_size(data, x_N.numel(), self.encoded_bytes(x_N.numel()))
        return self._read(np.frombuffer(view, dtype=np.uint8), x_N)

    def accumulate(self, data: Data, weight: float, acc_N: Tensor) -> None:
        """Add weight * decode(data) to `acc_N`, a contiguous fp32 CPU vector. `weight`, the product and the sum are
        each rounded to fp32. A CodecError leaves `acc_N` unchanged.

        The caller must ensure that the sum is finite. Under `torch.set_flush_denormal` sums below 2^-126 may differ.
        """
        _check_writable(acc_N)
        if not abs(weight) <= torch.finfo(torch.float32).max:
            raise CodecError(f"a weight of {weight}")
        view = check_size(data, acc_N.numel(), self.encoded_bytes(acc_N.numel()))
        self._accumulate(np.frombuffer(view, dtype=np.uint8), np.float32(weight), acc_N)

    def combine(
        self, encoded: Sequence[Data], weights: Sequence[float], num_values: int, buffer: bytearray | memoryview
    ) -> None:
        """Write the encoding of the sum of weight * decode(data) to `buffer`, whose size must be exact: the bytes of
        `encode` after `accumulate` of each, in this order. All of `encoded` have passed `check`; one of them may lie in
        `buffer`.

        Raises CodecError if the sum cannot be encoded.
        """
        sum_N = torch.zeros(num_values)
        for data, weight in zip(encoded, weights, strict=True):
            self.accumulate(data, weight, sum_N)
        self.encode_into(sum_N, buffer)

    @abstractmethod
    def _write(self, x_N: Tensor, wire: NDArray[np.uint8]) -> None:
        """Encode `x_N`, contiguous fp32 on any device, into `wire` of `encoded_bytes`. Raises CodecError if it is not
        finite."""

    @abstractmethod
    def _check(self, wire: NDArray[np.uint8], num_values: int) -> float:
        """Check `wire`: `encoded_bytes` from anyone, unaligned. Return the bound of `check`. Raises CodecError for
        bytes that no encoder writes."""

    @abstractmethod
    def _read(self, wire: NDArray[np.uint8], x_N: Tensor) -> float:
        """Decode `wire`, `encoded_bytes` from anyone, unaligned, into `x_N`, contiguous fp32 on the CPU. Return the
        bound of `check`."""

    def _accumulate(self, wire: NDArray[np.uint8], weight: np.float32, acc_N: Tensor) -> None:
        x_N = torch.empty(acc_N.numel())
        self._read(wire, x_N)
        # numpy, because torch's weighted addition fuses product and sum if the CPU can
        product_N = x_N.numpy()
        np.multiply(product_N, weight, out=product_N)
        np.add(acc_N.numpy(), product_N, out=acc_N.numpy())


def check_vector(x_N: Tensor) -> Tensor:
    """Return `x_N`, contiguous and detached from autograd. Raises CodecError unless it is a flat fp32 vector."""
    if x_N.dtype != torch.float32 or x_N.dim() != 1:
        raise CodecError(f"expected a flat float32 vector, got {tuple(x_N.shape)} of {x_N.dtype}")
    return x_N.detach().contiguous()


def magnitude(x_N: Tensor) -> float:
    """Return the largest absolute value: 0 for an empty tensor, NaN if any value is NaN."""
    # `aminmax` of a vector with a NaN returns NaN twice
    return max(abs(float(extreme)) for extreme in torch.aminmax(x_N)) if x_N.numel() else 0.0


def check_finite(x_N: Tensor, message: str) -> float:
    """Return the magnitude of `x_N`. Raises CodecError with `message` if a value is not finite."""
    largest = magnitude(x_N)
    if not math.isfinite(largest):
        raise CodecError(message)
    return largest


def check_size(data: Data, num_values: int, expected_bytes: int) -> memoryview:
    """Return `data` as a flat view of bytes. Raises CodecError unless it has `expected_bytes`."""
    if num_values < 0:
        raise CodecError(f"a vector cannot have {num_values} values")
    view = memoryview(data)
    if view.nbytes != expected_bytes:
        raise CodecError(f"{num_values} values take {expected_bytes} bytes, got {view.nbytes}")
    if not view.c_contiguous:
        raise CodecError("the bytes are not contiguous")
    return view.cast("B")


def _check_writable(x_N: Tensor) -> None:
    plain = x_N.dtype == torch.float32 and x_N.dim() == 1 and x_N.device.type == "cpu" and x_N.is_contiguous()
    if not plain or x_N.requires_grad:
        raise CodecError(
            f"cannot write to {tuple(x_N.shape)} of {x_N.dtype} on {x_N.device}: only to a flat, contiguous"
            " float32 vector on the CPU without gradient"
        )


class FloatCodec(Codec):
    """The codec of the float format `name`. Exact for values that the format can represent; larger ones are a
    CodecError."""

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
        """Return the values [N], all finite, in the format's own type, and their magnitude."""
        dtype, bits = _WIRE[self.name]
        # astype copies: torch accepts neither foreign byte orders nor memory that is read-only or unaligned
        wire_N = torch.from_numpy(wire.view(bits).astype(bits[1:])).view(dtype)
        return wire_N, check_finite(wire_N, "a value is not finite")
