"""The int8 block format: its error, its exactness, its decoder's refusals, and the loops that compute it."""

from __future__ import annotations

import os
import signal
import struct
import warnings

import numpy as np
import pytest
import torch
from compression.vectors import any_vectors, known_vector
from hypothesis import given
from swarm_compression import CodecError, get_codec, warm_up
from swarm_compression.int8 import BLOCK_VALUES, CORE_VALUES, MIN_ABSMAX, load_kernels

INT8 = get_codec("int8")


def _scales(data: bytes, num_values: int) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4", count=-(-num_values // BLOCK_VALUES))


def _one_value(scale: float, code: int) -> bytes:
    return struct.pack("<fb", scale, code)


@given(x_N=any_vectors)
def test_round_trip_any_block_errs_by_at_most_half_a_step(x_N: torch.Tensor) -> None:
    decoded_N = INT8.decode(INT8.encode(x_N), x_N.numel()).double()
    for x_C, decoded_C in zip(x_N.double().split(BLOCK_VALUES), decoded_N.split(BLOCK_VALUES), strict=True):
        absmax = float(x_C.abs().max()) if x_C.numel() else 0.0
        bound = absmax / 254 * (1 + 1e-5) if absmax >= MIN_ABSMAX else MIN_ABSMAX
        assert x_C.numel() == 0 or float((x_C - decoded_C).abs().max()) <= bound


@given(x_N=any_vectors)
def test_encode_any_vector_has_scales_whose_products_with_codes_are_exact(x_N: torch.Tensor) -> None:
    scale_K = _scales(INT8.encode(x_N), x_N.numel())
    code_C = np.arange(-127, 128)
    exact = scale_K[:, None].astype(np.float64) * code_C
    assert np.array_equal(exact, (scale_K[:, None] * code_C.astype(np.float32)).astype(np.float64))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-30, 1e30])
def test_round_trip_constant_block_keeps_the_value(value: float) -> None:
    x_N = torch.full((300,), value)
    decoded_N = INT8.decode(INT8.encode(x_N), 300)
    torch.testing.assert_close(decoded_N, x_N, rtol=2.0**-15, atol=0.0)
    if value == 0.0:
        assert bool((decoded_N == 0.0).all())


@pytest.mark.parametrize("absmax", [1e-45, 1e-38, float(np.nextafter(np.float32(MIN_ABSMAX), np.float32(0)))])
def test_encode_block_under_the_least_absmax_becomes_zeros(absmax: float) -> None:
    assert INT8.encode(torch.tensor([absmax, -absmax])) == bytes(6)


def test_encode_least_and_largest_absmax_are_kept() -> None:
    for absmax in (MIN_ABSMAX, torch.finfo(torch.float32).max):
        x_N = torch.tensor([absmax, -absmax, 0.0])
        torch.testing.assert_close(INT8.decode(INT8.encode(x_N), 3), x_N, rtol=2.0**-15, atol=0.0)


def test_encode_ties_round_to_even() -> None:
    # the scale is exactly 1, so the halves are exact
    x_N = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert INT8.decode(INT8.encode(x_N), 6).tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]


def test_encode_blocks_are_independent_of_their_neighbours() -> None:
    x_N = known_vector(600)
    data, last = INT8.encode(x_N), INT8.encode(x_N[512:])
    assert data[8:12] == last[:4]
    assert data[12 + 512 :] == last[4:]


def test_encode_more_than_one_slab_equals_block_by_block() -> None:
    x_N = known_vector((1 << 17) + 300)
    parts = [INT8.encode(x_C) for x_C in x_N.split(BLOCK_VALUES)]
    assert INT8.encode(x_N) == b"".join(part[:4] for part in parts) + b"".join(part[4:] for part in parts)


def test_encode_any_number_of_threads_gives_the_same_bytes() -> None:
    x_N = known_vector(300_000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = INT8.encode(x_N)
        torch.set_num_threads(2)
        assert INT8.encode(x_N) == one
    finally:
        torch.set_num_threads(before)


def test_round_trip_normal_values_relative_mse_is_under_1e_4() -> None:
    x_N = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    error_N = INT8.decode(INT8.encode(x_N), x_N.numel()) - x_N
    assert float(error_N.square().mean() / x_N.square().mean()) < 1e-4


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, -0.0, 1e-45, 1e-38, 1e-33, 1.0 + 2.0**-23, 1e37])
def test_decode_scale_that_no_encoder_writes_is_refused(scale: float) -> None:
    with pytest.raises(CodecError, match="scale"):
        INT8.decode(_one_value(scale, 1), 1)


def test_decode_code_that_no_encoder_writes_is_refused() -> None:
    with pytest.raises(CodecError, match="-128"):
        INT8.decode(_one_value(1.0, -128), 1)
    assert INT8.decode(_one_value(1.0, -127), 1).tolist() == [-127.0]


@pytest.mark.parametrize("num_values", [2 * CORE_VALUES, 3 * CORE_VALUES + 77])
def test_any_number_of_cores_gives_the_same_bytes_and_sums(num_values: int) -> None:
    codec, x_N = INT8, known_vector(num_values)
    before, outputs = torch.get_num_threads(), set()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            data, acc_N = codec.encode(x_N), torch.ones(num_values)
            codec.accumulate(data, 0.3, acc_N)
            outputs.add((data, codec.decode(data, num_values).numpy().tobytes(), acc_N.numpy().tobytes()))
    finally:
        torch.set_num_threads(before)
    assert len(outputs) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_has_its_own_threads() -> None:
    codec, x_N = INT8, known_vector(2 * CORE_VALUES)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        data = codec.encode(x_N)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is dangerous
            child = os.fork()
        if child == 0:
            same = False
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)  # it would wait for threads that it does not have
                same = codec.encode(x_N) == data
            finally:
                os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


def test_encode_value_that_is_not_finite_in_the_piece_of_any_core_is_refused() -> None:
    for place in (0, CORE_VALUES, 2 * CORE_VALUES - 1):
        x_N = torch.ones(2 * CORE_VALUES)
        x_N[place] = float("nan")
        with pytest.raises(ValueError, match="not finite"):
            INT8.encode(x_N)


def test_codec_is_quick_once_its_fused_loops_are_compiled() -> None:
    load_kernels.cache_clear()
    assert not INT8.is_quick
    warm_up()
    assert INT8.is_quick
    assert not get_codec("fp16").is_quick
