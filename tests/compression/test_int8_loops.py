"""The compiled int8 loops give the same bytes and the same sums as plain ones in torch and numpy."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from compression.plain_int8 import PLAIN
from compression.vectors import any_vectors, known_vector
from hypothesis import given
from hypothesis import strategies as st
from swarm_compression.int8 import (
    BLOCK_VALUES,
    MAX_SCALE_BITS,
    MIN_SCALE_BITS,
    Codes,
    Floats,
    Kernels,
    load_kernels,
)

FUSED = load_kernels()
SOUND_BITS = [0, MIN_SCALE_BITS, MAX_SCALE_BITS]
SCALE_BITS = [*SOUND_BITS, 1, MIN_SCALE_BITS - 256, MIN_SCALE_BITS + 1, MAX_SCALE_BITS + 256, -(2**31)]
finite_weights = st.floats(width=32, min_value=-4, max_value=4)


def quantized(kernels: Kernels, x_N: Floats) -> tuple[bool, Floats, Codes]:
    scale_K, code_N = np.empty(-(-x_N.size // BLOCK_VALUES), np.float32), np.empty(x_N.size, np.int8)
    return kernels.quantize(x_N, scale_K, code_N), scale_K, code_N


@given(x_N=any_vectors)
def test_fused_quantize_equals_plain(x_N: torch.Tensor) -> None:
    fused, plain = quantized(FUSED, x_N.numpy()), quantized(PLAIN, x_N.numpy())
    assert fused[0] is plain[0] is True
    assert fused[1].tobytes() == plain[1].tobytes()
    assert fused[2].tobytes() == plain[2].tobytes()


@given(seed=st.integers(0, 2**31), exponent=st.integers(-125, 120))
def test_fused_quantize_equals_plain_on_values_near_ties(seed: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    halves_N = rng.integers(-254, 255, 600).astype(np.float32) / 2
    x_N = np.nextafter(halves_N, rng.choice([-np.inf, 0, np.inf], 600).astype(np.float32)) * np.float32(2.0**exponent)
    assert [part.tobytes() for part in quantized(FUSED, x_N)[1:]] == [
        part.tobytes() for part in quantized(PLAIN, x_N)[1:]
    ]


@given(x_N=any_vectors, acc=st.data(), weight=finite_weights)
def test_fused_dequantize_and_accumulate_equal_plain(x_N: torch.Tensor, acc: st.DataObject, weight: float) -> None:
    _, scale_K, code_N = quantized(PLAIN, x_N.clamp(-1e30, 1e30).numpy())
    start_N = np.full(x_N.numel(), acc.draw(st.floats(-(2.0**100), 2.0**100, width=32)), np.float32)
    outputs = []
    for kernels in (FUSED, PLAIN):
        decoded_N, acc_N = np.empty_like(start_N), start_N.copy()
        kernels.dequantize(code_N, scale_K, decoded_N)
        kernels.accumulate(code_N, scale_K, np.float32(weight), acc_N)
        outputs.append((decoded_N, acc_N))
        # two roundings, one after the other
        assert acc_N.tobytes() == (start_N + np.float32(weight) * decoded_N).tobytes()
    assert outputs[0][0].tobytes() == outputs[1][0].tobytes()


@given(
    bits=st.lists(st.integers(-(2**31), 2**31 - 1) | st.sampled_from(SCALE_BITS), max_size=40),
    codes=st.binary(max_size=300),
)
def test_fused_check_equals_plain(bits: list[int], codes: bytes) -> None:
    bits_K, code_N = np.array(bits, np.int32), np.frombuffer(codes, np.int8)
    assert FUSED.check(bits_K, code_N) == PLAIN.check(bits_K, code_N)
    assert FUSED.check(bits_K, code_N)[1] == (b"\x80" not in codes)


@pytest.mark.parametrize("kernels", [FUSED, PLAIN], ids=["fused", "plain"])
@pytest.mark.parametrize("bits", SCALE_BITS)
def test_check_knows_the_least_and_the_largest_scale(kernels: Kernels, bits: int) -> None:
    many_K = np.array([MIN_SCALE_BITS] * 20 + [bits] + [0] * 20, np.int32)
    assert kernels.check(many_K, np.empty(0, np.int8)) == (bits in SOUND_BITS, True)


@pytest.mark.parametrize("kernels", [FUSED, PLAIN], ids=["fused", "plain"])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 255, 256, 299])
def test_quantize_reports_a_value_that_is_not_finite(kernels: Kernels, bad: float, place: int) -> None:
    x_N = np.ones(300, np.float32)
    x_N[place] = bad
    assert quantized(kernels, x_N)[0] is False


def test_load_compiles_when_the_cache_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_real, refused = numba.njit, []

    def njit(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            refused.append(args)
            raise RuntimeError("cannot cache function: no locator available")
        return compile_for_real(*args, **options)

    monkeypatch.setattr(numba, "njit", njit)
    x_N = known_vector(300).numpy()
    assert quantized(load_kernels.__wrapped__(), x_N)[2].tobytes() == quantized(PLAIN, x_N)[2].tobytes()
    assert len(refused) == 4
