"""Rows of activations: exact sizes, bounded errors, and the same bytes for a row at any position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm_compression import CodecError, get_row_codec, row_codec_names
from swarm_protocol import rows as protocol_rows
from torch import Tensor

EVERY_CODEC = pytest.mark.parametrize("name", row_codec_names())
SHAPES = [(1, 1), (1, 64), (3, 65), (2, 127), (5, 512)]


def activations(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    """Return activations with outliers in some columns, as real ones have."""
    x_RC = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))
    x_RC[:, ::37] *= 50
    return x_RC


def test_row_codecs_are_those_of_the_protocol() -> None:
    assert set(row_codec_names()) == set(protocol_rows.CODECS)
    for name in row_codec_names():
        for num_columns in (1, 63, 64, 65, 4096):
            assert get_row_codec(name).row_bytes(num_columns) == protocol_rows.row_bytes(name, num_columns)


@EVERY_CODEC
@pytest.mark.parametrize("shape", SHAPES)
def test_row_codec_gives_rows_of_their_size_that_can_be_cut_anywhere(name: str, shape: tuple[int, int]) -> None:
    codec, x_RC = get_row_codec(name), activations(*shape)
    data, size = codec.encode(x_RC), codec.row_bytes(shape[1])
    assert len(data) == shape[0] * size
    for row in range(shape[0]):
        assert codec.encode(x_RC[row : row + 1]) == data[row * size : (row + 1) * size]
    decoded_RC = codec.decode(data, *shape)
    assert decoded_RC.dtype == torch.float32
    assert torch.equal(codec.decode(data[size:], shape[0] - 1, shape[1]), decoded_RC[1:])


@EVERY_CODEC
def test_row_codec_takes_rows_that_are_not_contiguous_and_views_of_bytes(name: str) -> None:
    codec, x_RC = get_row_codec(name), activations(8, 128)
    data = codec.encode(x_RC[::2, ::2])
    assert data == codec.encode(x_RC[::2, ::2].contiguous())
    view = memoryview(b"x" + data)[1:]
    assert torch.equal(codec.decode(view, 4, 64), codec.decode(data, 4, 64))


@given(seed=st.integers(0, 2**31), exponent=st.integers(-90, 90), num_columns=st.integers(1, 200))
def test_int8_rows_err_less_than_the_bound(seed: int, exponent: int, num_columns: int) -> None:
    codec = get_row_codec("int8")
    x_RC = activations(2, num_columns, seed) * 2.0**exponent
    error_RC = (codec.decode(codec.encode(x_RC), 2, num_columns) - x_RC).abs()
    for start in range(0, num_columns, 64):
        block_RB = x_RC[:, start : start + 64]
        bound_R = block_RB.abs().amax(dim=1) / 254 * (1 + 2**-7) * (1 + 1e-5)
        assert (error_RC[:, start : start + 64].amax(dim=1) <= bound_R).all()


def test_row_codecs_have_the_expected_errors() -> None:
    x_RC = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    errors = {}
    for name in row_codec_names():
        codec = get_row_codec(name)
        errors[name] = float((codec.decode(codec.encode(x_RC), 64, 512) - x_RC).norm() / x_RC.norm())
    assert errors["raw"] == 0
    assert 0 < errors["bf16"] < 0.002
    assert errors["bf16"] < errors["int8"] < 0.007


@EVERY_CODEC
def test_row_codec_keeps_zeros_and_the_largest_values(name: str) -> None:
    codec = get_row_codec(name)
    x_RC = torch.zeros(2, 70)
    x_RC[1, 3] = -1e36
    decoded_RC = codec.decode(codec.encode(x_RC), 2, 70)
    assert torch.equal(decoded_RC[0], x_RC[0])
    assert decoded_RC[1, 3] == pytest.approx(-1e36, rel=0.01)
    assert decoded_RC.isfinite().all()


@EVERY_CODEC
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_row_codec_refuses_to_encode_values_that_are_not_finite(name: str, value: float) -> None:
    x_RC = activations(2, 70)
    x_RC[1, 69] = value
    with pytest.raises(CodecError, match="finite"):
        get_row_codec(name).encode(x_RC)


@EVERY_CODEC
def test_row_codec_refuses_bytes_of_another_size(name: str) -> None:
    codec = get_row_codec(name)
    data = codec.encode(activations(2, 70))
    for wrong in (data[:-1], data + b"x", b""):
        with pytest.raises(CodecError, match="take"):
            codec.decode(wrong, 2, 70)


@EVERY_CODEC
@given(data=st.binary(min_size=300, max_size=300))
def test_row_codec_decodes_any_bytes_to_finite_numbers_or_refuses(name: str, data: bytes) -> None:
    codec = get_row_codec(name)
    try:
        decoded_RC = codec.decode(data[: 2 * codec.row_bytes(36)], 2, 36)
    except CodecError:
        return
    assert decoded_RC.isfinite().all()


@pytest.mark.parametrize(
    ("at", "byte"),
    [(1, 0x80), (1, 0x7F), (1, 0x79), (60, 0x80)],
    ids=["negative scale", "infinite scale", "scale too large", "code -128"],
)
def test_int8_rows_refuse_bytes_that_no_encoder_writes(at: int, byte: int) -> None:
    codec = get_row_codec("int8")
    data = bytearray(codec.encode(activations(1, 64)))
    data[at] = byte
    with pytest.raises(CodecError):
        codec.decode(data, 1, 64)


def test_get_row_codec_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(CodecError, match="raw, bf16, int8"):
        get_row_codec("fp4")
