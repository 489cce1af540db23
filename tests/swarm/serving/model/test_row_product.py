"""Products of few rows past oneDNN give the same numbers, row by row, and only where the weights are laid out so."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from swarm.serving.model import row_product
from swarm.serving.model.packing import PackedLinear, can_pack, pack_linears
from swarm.serving.model.row_product import FewRows, few_rows
from torch import nn

pytestmark = pytest.mark.skipif(
    not can_pack() or row_product.kernel() is None, reason="no such products on this processor"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def linear(num_in: int, num_out: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(num_in, num_out, bias=bias).requires_grad_(False)


def product_of(plain: nn.Linear) -> FewRows:
    found = PackedLinear(plain).for_few(1)
    assert found is not None
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("num_in", "num_out"), [(11, 130), (16, 64), (63, 65), (64, 37), (65, 63), (512, 1704)])
def test_product_of_any_shape_is_that_of_the_plain_layer(num_in: int, num_out: int, bias: bool) -> None:
    plain = linear(num_in, num_out, bias=bias)
    product = product_of(plain)
    exact = copy.deepcopy(plain).double()
    for num_rows in (0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 64):
        x = torch.randn(num_rows, num_in)
        found = torch.from_numpy(product(x.numpy()))
        torch.testing.assert_close(found, exact(x.double()).float(), rtol=1e-5, atol=1e-5)


def test_product_a_row_is_the_same_alone_and_beside_any_others() -> None:
    product = product_of(linear(1704, 512))
    x = np.random.default_rng(0).standard_normal((64, 1704), np.float32)
    together = product(x)
    for num_rows in range(1, 64):
        assert np.array_equal(product(x[:num_rows]), together[:num_rows])
    for row in range(64):
        assert np.array_equal(product(x[row : row + 1])[0], together[row])


def test_product_keeps_what_is_not_finite_in_its_own_row() -> None:
    product = product_of(linear(96, 100))
    for bad in (np.nan, np.inf):
        x = np.ones((6, 96), np.float32)
        x[4, 95] = bad
        finite = np.isfinite(product(x))
        assert not finite[4].any()
        assert finite[[0, 1, 2, 3, 5]].all()


def test_product_of_rows_of_another_width_is_refused() -> None:
    packed = PackedLinear(linear(32, 48))
    product = packed.for_few(2)
    assert product is not None
    for width in (16, 31, 33, 48, 64, 4096):
        with pytest.raises(ValueError, match=f"rows of {width} for a layer of 32 inputs"):
            product(np.ones((2, width), np.float32))
        with pytest.raises(ValueError, match=f"rows of {width}"):
            packed(torch.ones(2, width))


def test_packed_linear_few_rows_on_one_thread_go_past_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedLinear(linear(32, 48))
    sizes = list[int]()
    product = torch.ops.mkldnn._linear_pointwise

    def counted(rows: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(len(rows))
        out: torch.Tensor = product(rows, *rest)
        return out

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    for shape in ((32,), (1, 64, 32), (65, 32)):
        assert packed(torch.randn(shape)).shape == (*shape[:-1], 48)
    assert sizes == [128]
    torch.set_num_threads(2)
    packed(torch.randn(4, 32))
    assert sizes == [128, 4]


def test_packed_linear_rows_that_do_not_follow_one_another_in_memory_are_the_plain_ones() -> None:
    plain = linear(32, 48)
    x = torch.randn(32, 6).t()
    torch.testing.assert_close(PackedLinear(plain)(x), plain(x))


def test_packed_linear_gradient_of_few_rows_is_that_of_the_plain_one() -> None:
    plain = linear(48, 80)
    x = torch.randn(3, 48)
    grads = []
    for module in (plain, PackedLinear(plain)):
        inputs = x.clone().requires_grad_()
        module(inputs).square().sum().backward()
        grads.append(inputs.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_pack_linears_layers_of_the_same_rows_give_few_rows_the_plain_ones() -> None:
    plain = nn.ModuleDict({name: linear(32, num_out) for name, num_out in (("gate_proj", 80), ("up_proj", 48))})
    packed = copy.deepcopy(plain)
    pack_linears(packed)
    x = torch.randn(5, 32)
    for name in plain:
        torch.testing.assert_close(packed[name](x), plain[name](x))


def test_few_rows_of_a_weight_that_is_laid_out_otherwise_are_none() -> None:
    """Also where it takes as many bytes."""
    plain, other = linear(64, 192), linear(64, 192)
    packed = PackedLinear(plain).weight
    assert few_rows(packed, plain) is not None
    other.weight.data[191, 63] += 1
    assert few_rows(packed, other) is None
    other.weight.data = plain.weight[:64].repeat(3, 1)
    assert few_rows(packed, other) is None
    small = linear(33, 37)
    assert few_rows(torch.ops.mkldnn._reorder_linear_weight(small.weight, 1), small) is None


def test_packed_linear_in_half_precision_computes_through_onednn() -> None:
    plain = linear(32, 48).bfloat16()
    packed = PackedLinear(plain)
    assert packed.for_few(1) is None
    x = torch.randn(3, 32).bfloat16()
    torch.testing.assert_close(packed(x), plain(x), rtol=1e-2, atol=1e-2)


def test_kernel_on_another_processor_or_without_numba_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx2": True})
        assert row_product.load() is None
    with monkeypatch.context() as patched:
        patched.setattr("numba.config.DISABLE_JIT", 1)
        assert row_product.load() is None
    monkeypatch.setattr(row_product, "load", Mock(side_effect=OSError("no libllvmlite")))
    assert row_product.kernel.__wrapped__() is None
    assert "no libllvmlite" in caplog.text


def test_packed_linear_without_a_kernel_computes_through_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_product, "kernel", lambda: None)
    plain = linear(32, 48)
    packed = PackedLinear(plain)
    assert packed.for_few(1) is None
    x = torch.randn(3, 32)
    torch.testing.assert_close(packed(x), plain(x))
