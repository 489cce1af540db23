"""Four bits a value, two values a byte, with one scale per block of 64: 0.53 bytes a value. `int4` and `e3m0`.

Layout, little-endian: ceil(N / 64) scales as bf16, then ceil(N / 2) bytes: the value of even index in the low half, the
next one in the high half. If N is odd, the last high half is 0. A code is a sign bit and one of eight magnitudes:

- int4: 0 to 7. scale = absmax / 7. |x - decoded| <= absmax / 14.
- e3m0: 0, 2^-6, 2^-5 … 1: three bits of exponent and no mantissa. scale = absmax. |x - decoded| <= |x| / 3, or
  absmax / 128 if that is more. It keeps small values that int4 rounds to 0 (Streaming DiLoCo, Douillard et al. 2025,
  arXiv 2501.18512, sends this; the block's length is ours).

Rounding adds 1e-5 of either bound. Both hold if the block's absmax is at least 2^-100. A smaller block becomes zeros,
so that all numbers used are normal. A scale is cut to bf16's 8 significant bits, so code * scale is exact in fp32. So
decoded values are the same on every machine, and encode to the same bytes again.

A value's code is the nearest magnitude to x * (1 / scale), each operation rounded to fp32. A tie goes to the even
magnitude in int4, to the larger one in e3m0. -0 becomes 0, and no encoder writes the code of -0. NaN and infinities are
refused.

Shapes: N values, S values of a slab, M bytes of codes, K blocks, C values a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swarm_compression.codec import Codec, CodecError, Data, check_size

BLOCK_VALUES = 64
MIN_ABSMAX = 2.0**-100
_SLAB_VALUES = 1 << 16  # temporaries stay in a core's cache
_MINUS_ZERO = 8


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The eight magnitudes of a format, ascending from 0, and the least value that rounds to each of the last seven."""

    values: tuple[float, ...]
    borders: tuple[float, ...]


def _above(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


INT4 = Magnitudes(
    tuple(range(8)),
    # a tie above an even magnitude rounds down to it
    tuple(_above(low + 0.5) if low % 2 == 0 else low + 0.5 for low in range(7)),
)
E3M0 = Magnitudes(
    (0.0, *(2.0**exponent for exponent in range(-6, 1))),
    (2.0**-7, *(1.5 * 2.0**exponent for exponent in range(-6, 0))),
)


class FourBitCodec(Codec):
    """Codec of four bits a value: a sign, and one of the eight `magnitudes` times the scale of the value's block."""

    def __init__(self, name: str, magnitudes: Magnitudes) -> None:
        super().__init__(name)
        self._borders = [np.float32(border) for border in magnitudes.borders]
        self._largest = np.float32(magnitudes.values[-1])
        value_of = np.array([*magnitudes.values, *(-value for value in magnitudes.values)], dtype=np.float32)
        byte = np.arange(256)
        # both values of a byte as one element of 8 bytes, for a fast lookup
        self._pair_of = np.stack([value_of[byte & 15], value_of[byte >> 4]], axis=1).view(np.int64).reshape(256)
        self._min_scale_bits = _bits_of(MIN_ABSMAX / float(self._largest))
        self._max_scale_bits = _bits_of(float(np.finfo(np.float32).max) / float(self._largest))

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * _num_blocks(num_values) + (num_values + 1) // 2

    def pieces(self, data: Data, num_values: int, start: int, stop: int) -> tuple[memoryview, ...]:
        view = check_size(data, num_values, self.encoded_bytes(num_values))
        codes = view[2 * _num_blocks(num_values) :]
        return view[2 * (start // BLOCK_VALUES) : 2 * _num_blocks(stop)], codes[start // 2 : (stop + 1) // 2]

    def _write(self, x_N: Tensor, wire: NDArray[np.uint8]) -> None:
        values_N = x_N.cpu().numpy()
        bits_K, code_M = _split(wire, values_N.size)
        for start in range(0, values_N.size, _SLAB_VALUES):
            x_S = values_N[start : start + _SLAB_VALUES]
            if gap := -x_S.size % BLOCK_VALUES:
                x_S = np.pad(x_S, (0, gap))  # zeros change neither absmax nor codes
            slab_bits, slab_codes = self._encode_slab(x_S.reshape(-1, BLOCK_VALUES))
            block, byte = start // BLOCK_VALUES, start // 2
            bits_K[block : block + slab_bits.size] = slab_bits
            code_M[byte : byte + slab_codes.size] = slab_codes[: code_M.size - byte]

    def _encode_slab(self, x_KC: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return the scales' bits [K] and the bytes of codes."""
        work_KC = np.abs(x_KC)
        # bit patterns of numbers >= 0 have the same order as the numbers, and a vectorized maximum
        absmax_K = work_KC.view(np.int32).max(axis=1).view(np.float32)
        if not np.isfinite(absmax_K).all():
            raise CodecError("a value is not finite")
        absmax_K[absmax_K < MIN_ABSMAX] = 0
        bits_K = (absmax_K / self._largest).view(np.int32) >> 16
        scale_K = (bits_K << 16).view(np.float32)
        inverse_K = np.divide(np.float32(1), scale_K, out=np.zeros_like(scale_K), where=scale_K > 0)
        np.multiply(x_KC, inverse_K[:, None], out=work_KC)
        code_KC = (work_KC <= -self._borders[0]).view(np.uint8) * np.uint8(_MINUS_ZERO)
        np.abs(work_KC, out=work_KC)
        for border in self._borders:
            code_KC += (work_KC >= border).view(np.uint8)
        pair = code_KC.reshape(-1).view("<u2")
        return bits_K, (pair | pair >> 4).astype(np.uint8)

    def _read(self, wire: NDArray[np.uint8], x_N: Tensor) -> float:
        num_values = x_N.numel()
        bits_K, code_M = _split(wire, num_values)
        largest = self._check(wire, num_values)
        scale_K = (bits_K.astype(np.uint32) << 16).view(np.float32)
        values_N = x_N.numpy()
        for start in range(0, num_values, _SLAB_VALUES):
            block, byte = start // BLOCK_VALUES, start // 2
            code_S = code_M[byte : byte + _SLAB_VALUES // 2]
            out_S = values_N[start : start + _SLAB_VALUES]
            value_S = np.take(self._pair_of, code_S, mode="clip").view(np.float32)[: out_S.size]
            num_whole = out_S.size // BLOCK_VALUES
            cut = num_whole * BLOCK_VALUES
            whole_KC = value_S[:cut].reshape(-1, BLOCK_VALUES)
            scale_of = scale_K[block : block + num_whole, None]
            np.multiply(whole_KC, scale_of, out=out_S[:cut].reshape(-1, BLOCK_VALUES))
            out_S[cut:] = value_S[cut:] * scale_K[block + num_whole : block + num_whole + 1]
        return largest

    def _check(self, wire: NDArray[np.uint8], num_values: int) -> float:
        bits_K, code_M = _split(wire, num_values)
        in_range_K = (bits_K >= self._min_scale_bits) & (bits_K <= self._max_scale_bits)
        if not bool(((bits_K == 0) | in_range_K).all()):
            raise CodecError("a scale is negative, not finite, or not one that an encoder writes")
        if bool((code_M & 15 == _MINUS_ZERO).any() or (code_M >> 4 == _MINUS_ZERO).any()):
            raise CodecError("minus zero is not a code")
        if num_values % 2 and code_M[-1] > 15:
            raise CodecError("there is a code after the last value")
        largest_bits = np.uint32(bits_K.max(initial=0)) << np.uint32(16)
        return float(largest_bits.view(np.float32)) * float(self._largest)


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK_VALUES)


def _split(wire: NDArray[np.uint8], num_values: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Return the scales' bits [K] and the bytes of codes [M]."""
    num_scale_bytes = 2 * _num_blocks(num_values)
    return wire[:num_scale_bytes].view("<u2"), wire[num_scale_bytes:]


def _bits_of(scale: float) -> int:
    """Return the upper half of an fp32's bits. Bit patterns of positive numbers have the same order as the numbers."""
    return int(np.float32(scale).view(np.int32)) >> 16
