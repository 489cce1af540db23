"""Properties that every codec of the registry has."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from compression.vectors import any_vectors, known_vector
from hypothesis import given
from hypothesis import strategies as st
from swarm_compression import CodecError, codec_names, get_codec
from swarm_compression.codec import CUT_VALUES, Data

every_codec = pytest.mark.parametrize("name", codec_names())

_KNOWN_SHA256 = {
    "fp32": "d8c18fa4abc75588f61aec05dd38642626f5befff638ae80c1a0319a592ea6a6",
    "fp16": "be04544e67ddafaf0df5790385bac8444f5a58b47d1106953abf0524a4a2a95f",
    "bf16": "0d0e155a65a5140e951e9b75bd6201fa088a600ccc0ac59f538204e6eae1dcf1",
    "int8": "4d68b1509f442a91fe8553ed89471de97d35cb764d61b849d3fca1c3bc75c295",
    "int4": "0ab045491c3089bd26fe5e25228e9997fdcaf376ce7b2c1b23bd4b343cbafb06",
    "e3m0": "fe6b9bcaa0ebee8fdd37dda0c462e66b9a031296b6c0788fed46bd375fbc14d8",
}


@every_codec
@given(x_N=any_vectors)
def test_check_returns_a_bound_close_to_the_largest_decoded_value(name: str, x_N: torch.Tensor) -> None:
    codec = get_codec(name)
    try:
        data = codec.encode(x_N)
    except CodecError:
        return  # too large for fp16
    decoded_N = torch.empty(x_N.numel())
    bound = codec.decode_into(data, decoded_N)
    found = decoded_N.abs().max().item() if x_N.numel() else 0.0
    assert found <= bound <= 1.2 * found
    assert codec.check(data, x_N.numel()) == bound


@every_codec
@pytest.mark.parametrize("num_values", [1, 256, 700, 1025])
def test_pieces_joined_are_the_encoding_of_all_values(name: str, num_values: int) -> None:
    codec, x_N = get_codec(name), known_vector(num_values)
    data, edges = codec.encode(x_N), [*range(0, num_values, CUT_VALUES), num_values]
    for start in edges[:-1]:
        for stop in (edge for edge in edges if edge > start):
            assert b"".join(codec.pieces(data, num_values, start, stop)) == codec.encode(x_N[start:stop])
    with pytest.raises(CodecError, match="bytes"):
        codec.pieces(data[:-1], num_values, 0, num_values)


def test_get_codec_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(CodecError, match="fp32, fp16, bf16, int8, int4, e3m0"):
        get_codec("int9")


@every_codec
@pytest.mark.parametrize("place", [None, 0, 2])  # one of `encoded` that is where the result will be
@pytest.mark.parametrize("num_values", [0, 1, 300, 32768, 100_001])
def test_combine_gives_the_bytes_of_the_sum_that_accumulate_makes(
    name: str, num_values: int, place: int | None
) -> None:
    codec, weights = get_codec(name), (0.3, 0.0, 0.7 / 3)
    encoded: list[Data] = [codec.encode(known_vector(num_values).roll(each)) for each in range(3)]
    sum_N = torch.zeros(num_values)
    for data, weight in zip(encoded, weights, strict=True):
        codec.accumulate(data, weight, sum_N)
    buffer = bytearray(codec.encoded_bytes(num_values))
    encoded[1] = memoryview(b"!" + encoded[1])[1:]  # not aligned
    if place is not None:
        buffer[:] = encoded[place]
        encoded[place] = buffer
    codec.combine(encoded, weights, num_values, buffer)
    assert buffer == codec.encode(sum_N)


@every_codec
def test_combine_of_a_sum_that_is_not_finite_is_refused(name: str) -> None:
    codec = get_codec(name)
    data = codec.encode(torch.full((40_000,), 60000.0))
    with np.errstate(over="ignore"), pytest.raises(CodecError):
        codec.combine([data] * 3, [3e38] * 3, 40_000, bytearray(len(data)))


@every_codec
def test_get_codec_known_name_gives_the_codec_of_that_name(name: str) -> None:
    assert get_codec(name).name == name


@every_codec
@given(x_N=any_vectors)
def test_encode_finite_vector_has_the_announced_size_and_decodes_finite(name: str, x_N: torch.Tensor) -> None:
    codec = get_codec(name)
    if name in ("fp16", "bf16"):
        x_N = x_N.clamp(-60000, 60000)
    data = codec.encode(x_N)
    decoded_N = codec.decode(data, x_N.numel())
    assert len(data) == codec.encoded_bytes(x_N.numel())
    assert decoded_N.dtype == torch.float32
    assert decoded_N.shape == x_N.shape
    assert bool(torch.isfinite(decoded_N).all())


@every_codec
@given(x_N=any_vectors)
def test_encode_of_decoded_values_gives_the_same_bytes(name: str, x_N: torch.Tensor) -> None:
    codec = get_codec(name)
    if name in ("fp16", "bf16"):
        x_N = x_N.clamp(-60000, 60000)
    data = codec.encode(x_N)
    assert codec.encode(codec.decode(data, x_N.numel())) == data


@every_codec
def test_encode_known_vector_gives_the_same_bytes_on_every_machine(name: str) -> None:
    assert hashlib.sha256(get_codec(name).encode(known_vector())).hexdigest() == _KNOWN_SHA256[name]


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_encode_one_value_not_finite_is_refused(name: str, bad: float) -> None:
    for place in (0, 255, 256, 299):
        x_N = torch.ones(300)
        x_N[place] = bad
        with pytest.raises(CodecError, match="not finite"):
            get_codec(name).encode(x_N)


@every_codec
@pytest.mark.parametrize("x_N", [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(())])
def test_encode_other_dtype_or_shape_is_refused(name: str, x_N: torch.Tensor) -> None:
    with pytest.raises(CodecError, match="flat float32"):
        get_codec(name).encode(x_N)


@every_codec
def test_encode_strided_vector_with_gradient_equals_its_plain_copy(name: str) -> None:
    x_N = known_vector().requires_grad_()[::3]
    assert get_codec(name).encode(x_N) == get_codec(name).encode(x_N.detach().clone())


@every_codec
@given(data=st.binary(max_size=700), num_values=st.integers(-2, 700))
def test_decode_any_bytes_gives_a_finite_vector_or_codec_error(name: str, data: bytes, num_values: int) -> None:
    try:
        x_N = get_codec(name).decode(data, num_values)
    except CodecError:
        return
    assert x_N.shape == (num_values,)
    assert bool(torch.isfinite(x_N).all())


@every_codec
@given(num_values=st.integers(1, 300), noise=st.data())
def test_decode_bytes_of_the_right_size_gives_a_finite_vector_or_codec_error(
    name: str, num_values: int, noise: st.DataObject
) -> None:
    codec = get_codec(name)
    size = codec.encoded_bytes(num_values)
    data = noise.draw(st.binary(min_size=size, max_size=size))
    try:
        x_N = codec.decode(data, num_values)
    except CodecError:
        return
    assert bool(torch.isfinite(x_N).all())


@every_codec
@given(x_N=any_vectors, noise=st.data())
def test_check_refuses_exactly_what_decode_refuses(name: str, x_N: torch.Tensor, noise: st.DataObject) -> None:
    codec, num_values = get_codec(name), x_N.numel()
    data = bytearray(codec.encode(x_N.clamp(-60000, 60000)))
    for place in noise.draw(st.lists(st.integers(0, max(0, len(data) - 1)), max_size=3)):
        data[place : place + 1] = noise.draw(st.sampled_from([b"\x80", b"\xff", b"\x7f", b"\x08", b""]))

    def refuses(function: Callable[[bytearray, int], object]) -> bool:
        try:
            function(data, num_values)
        except CodecError:
            return True
        return False

    assert refuses(codec.check) == refuses(codec.decode)


@every_codec
def test_check_and_decode_refuse_a_value_that_is_not_finite_and_a_size_that_is_wrong(name: str) -> None:
    codec = get_codec(name)
    data = codec.encode(known_vector())
    codec.check(data, 1000)
    for bad in (b"\xff" * len(data), data[:-1], data + b"\0"):
        for function in (codec.check, codec.decode):
            with pytest.raises(CodecError):
                function(bad, 1000)


@every_codec
def test_decode_wrong_size_is_refused_before_anything_is_allocated(name: str) -> None:
    with pytest.raises(CodecError, match="bytes, got 5"):
        get_codec(name).decode(b"12345", 1 << 60)


@every_codec
def test_decode_discontiguous_view_is_refused(name: str) -> None:
    codec = get_codec(name)
    doubled = bytes(2 * codec.encoded_bytes(256))
    with pytest.raises(CodecError, match="contiguous"):
        codec.decode(memoryview(doubled)[::2], 256)


@every_codec
@given(x_N=any_vectors)
def test_codec_writes_the_same_into_its_caller_s_buffers_as_it_returns(name: str, x_N: torch.Tensor) -> None:
    codec = get_codec(name)
    x_N = x_N.clamp(-60000, 60000)
    data, num_values = codec.encode(x_N), x_N.numel()
    buffer = bytearray(len(data) + 1)
    codec.encode_into(x_N, memoryview(buffer)[1:])  # not aligned
    assert bytes(buffer[1:]) == data
    decoded_N, acc_N = torch.full((num_values,), 7.0), torch.full((num_values,), 7.0)
    codec.decode_into(memoryview(buffer)[1:], decoded_N)
    assert decoded_N.numpy().tobytes() == codec.decode(data, num_values).numpy().tobytes()
    codec.accumulate(memoryview(buffer)[1:], 0.3, acc_N)
    expected_N = np.float32(7) + np.float32(0.3) * decoded_N.numpy()  # two roundings
    assert acc_N.numpy().tobytes() == expected_N.tobytes()


@every_codec
@given(noise=st.data())
def test_accumulate_bytes_that_are_refused_leaves_the_sum(name: str, noise: st.DataObject) -> None:
    codec, acc_N = get_codec(name), torch.ones(300)
    size = codec.encoded_bytes(300)
    data = noise.draw(st.binary(min_size=size, max_size=size))
    try:
        codec.decode(data, 300)
    except CodecError:
        with pytest.raises(CodecError):
            codec.accumulate(data, 1.0, acc_N)
        assert acc_N.tolist() == [1.0] * 300


@every_codec
@pytest.mark.parametrize(
    "into_N",
    [
        torch.zeros(20)[::2],
        torch.zeros(10, dtype=torch.float64),
        torch.zeros(2, 5),
        torch.zeros(10, requires_grad=True),
    ],
    ids=["strided", "fp64", "matrix", "gradient"],
)
def test_codec_writes_only_to_flat_contiguous_fp32(name: str, into_N: torch.Tensor) -> None:
    data = get_codec(name).encode(torch.ones(10))
    with pytest.raises(CodecError, match="cannot write"):
        get_codec(name).decode_into(data, into_N)
    with pytest.raises(CodecError, match="cannot write"):
        get_codec(name).accumulate(data, 1.0, into_N)


@every_codec
def test_codec_refuses_buffers_of_another_size_or_read_only_and_weights_not_finite(name: str) -> None:
    codec, x_N = get_codec(name), torch.ones(10)
    data = codec.encode(x_N)
    with pytest.raises(CodecError, match="take"):
        codec.encode_into(x_N, bytearray(len(data) + 1))
    with pytest.raises(CodecError, match="written"):
        codec.encode_into(x_N, memoryview(data))
    with pytest.raises(CodecError, match="take"):
        codec.decode_into(data + b"x", x_N)
    for weight in (float("nan"), float("inf"), 1e39):
        with pytest.raises(CodecError, match="weight"):
            codec.accumulate(data, weight, x_N)
    assert x_N.tolist() == [1.0] * 10


@every_codec
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decode_any_kind_of_buffer_warns_of_nothing_and_does_not_alias_it(name: str, kind: type) -> None:
    codec = get_codec(name)
    data = codec.encode(known_vector())
    source = kind(bytearray(data)) if kind is memoryview else kind(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x_N = codec.decode(source, 1000)
    before_N = x_N.clone()
    if kind is not bytes:
        source[:] = bytes(len(data))
    assert torch.equal(x_N, before_N)
    x_N += 1.0


@pytest.mark.parametrize(("name", "relative"), [("fp32", 0.0), ("fp16", 2.0**-11), ("bf16", 2.0**-8)])
@given(x_N=any_vectors)
def test_float_codec_error_is_at_most_half_a_step(name: str, relative: float, x_N: torch.Tensor) -> None:
    codec = get_codec(name)
    x_N = x_N if name == "fp32" else x_N.clamp(-60000, 60000)
    error_N = (codec.decode(codec.encode(x_N), x_N.numel()) - x_N).abs()
    # below the least normal number the steps no longer shrink
    assert bool((error_N <= relative * x_N.abs() + (0.0 if name == "fp32" else 2.0**-25)).all())


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_encode_value_over_the_formats_range_is_refused(name: str) -> None:
    with pytest.raises(CodecError, match=f"larger than {name}"):
        get_codec(name).encode(torch.tensor([torch.finfo(torch.float32).max]))
