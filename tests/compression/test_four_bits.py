"""int4 and e3m0: their errors, their bytes compared with a reference that encodes one value at a time, and refusals."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from compression.vectors import any_vectors, known_vector
from hypothesis import given
from swarm_compression import CodecError, get_codec
from swarm_compression.four_bits import BLOCK_VALUES, E3M0, INT4, MIN_ABSMAX, FourBitCodec, Magnitudes

FORMATS = {"int4": INT4, "e3m0": E3M0}
both = pytest.mark.parametrize("name", FORMATS)


def reference(magnitudes: Magnitudes, x_N: torch.Tensor, *, ties_up: bool) -> bytes:
    """Encode one value after the other, as the format's docstring says."""
    scales, codes = b"", []
    for x_C in np.split(x_N.numpy(), range(BLOCK_VALUES, x_N.numel(), BLOCK_VALUES)) if x_N.numel() else []:
        absmax = np.abs(x_C).max()
        scale_bytes = struct.pack("<f", absmax / np.float32(magnitudes.values[-1]))[2:]
        if absmax < MIN_ABSMAX:
            scale_bytes = bytes(2)
        scales += scale_bytes
        scale = np.float32(struct.unpack("<f", bytes(2) + scale_bytes)[0])
        for x in x_C:
            size = abs(float(x * (np.float32(1) / scale))) if scale else 0.0
            distances = [abs(size - value) for value in magnitudes.values]
            nearest = [code for code, distance in enumerate(distances) if distance == min(distances)]
            code = nearest[-1] if ties_up else min(nearest, key=lambda code: code % 2)
            codes.append(code + 8 * (x < 0 and code > 0))
    codes += [0] * (len(codes) % 2)
    return scales + bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


@both
@given(x_N=any_vectors)
def test_encode_any_vector_gives_the_reference_bytes(name: str, x_N: torch.Tensor) -> None:
    assert get_codec(name).encode(x_N) == reference(FORMATS[name], x_N, ties_up=name == "e3m0")


@given(x_N=any_vectors)
def test_int4_round_trip_errs_by_at_most_half_a_step(x_N: torch.Tensor) -> None:
    error_N, absmax_N = _errors("int4", x_N)
    assert bool((error_N <= torch.where(absmax_N >= MIN_ABSMAX, absmax_N / 14 * (1 + 1e-5), MIN_ABSMAX)).all())


@given(x_N=any_vectors)
def test_e3m0_round_trip_errs_by_at_most_a_third_or_a_128th_of_the_largest(x_N: torch.Tensor) -> None:
    error_N, absmax_N = _errors("e3m0", x_N)
    bound_N = torch.maximum(x_N.double().abs() / 3, absmax_N / 128) * (1 + 1e-5)
    assert bool((error_N <= torch.where(absmax_N >= MIN_ABSMAX, bound_N, MIN_ABSMAX)).all())


def _errors(name: str, x_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the error of each value, and the largest magnitude of its block, as [N] in fp64."""
    codec = get_codec(name)
    error_N = (codec.decode(codec.encode(x_N), x_N.numel()).double() - x_N.double()).abs()
    absmax = [x_C.abs().max().repeat(x_C.numel()) for x_C in x_N.double().split(BLOCK_VALUES) if x_C.numel()]
    return error_N, torch.cat(absmax) if absmax else error_N


def test_encode_ties_round_to_even_in_int4_and_up_in_e3m0() -> None:
    x_N = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -0.0])
    assert get_codec("int4").decode(get_codec("int4").encode(x_N), 7).tolist() == [7.0, 0.0, 2.0, 2.0, 0.0, -2.0, 0.0]
    x_N = torch.tensor([1.0, 0.75, -0.375, 2.0**-7, 0.99 * 2.0**-7, -0.0])
    assert get_codec("e3m0").decode(get_codec("e3m0").encode(x_N), 6).tolist() == [1.0, 1.0, -0.5, 2.0**-6, 0.0, 0.0]


@both
def test_encode_of_slabs_at_any_offset_equals_block_by_block(name: str) -> None:
    x_N = known_vector((1 << 16) + 131)
    parts = [get_codec(name).encode(x_C) for x_C in x_N.split(BLOCK_VALUES)]
    assert get_codec(name).encode(x_N) == b"".join(part[:2] for part in parts) + b"".join(part[2:] for part in parts)


@both
def test_round_trip_takes_at_most_0_54_bytes_a_value(name: str) -> None:
    assert get_codec(name).encoded_bytes(1_000_000) <= 540_000
    assert isinstance(get_codec(name), FourBitCodec)


@both
@pytest.mark.parametrize("scale_bits", [0x8000, 0x7F80, 0x7FC0, 0xBF80, 0x0001, 0x0080])
def test_decode_scale_that_no_encoder_writes_is_refused(name: str, scale_bits: int) -> None:
    with pytest.raises(CodecError, match="scale"):
        get_codec(name).decode(struct.pack("<HB", scale_bits, 1), 1)


def test_decode_scale_that_would_overflow_is_refused() -> None:
    with pytest.raises(CodecError, match="scale"):
        get_codec("int4").decode(struct.pack("<HB", 0x7F7F, 1), 1)
    assert get_codec("e3m0").decode(struct.pack("<HB", 0x7F7F, 7), 1).isfinite().all()


@both
@pytest.mark.parametrize("code", [0x08, 0x80])
def test_decode_minus_zero_is_refused(name: str, code: int) -> None:
    with pytest.raises(CodecError, match="minus zero"):
        get_codec(name).decode(struct.pack("<HB", 0x3F80, code), 2)


@both
def test_decode_code_after_the_last_value_is_refused(name: str) -> None:
    with pytest.raises(CodecError, match="after the last"):
        get_codec(name).decode(struct.pack("<HB", 0x3F80, 0x11), 1)
