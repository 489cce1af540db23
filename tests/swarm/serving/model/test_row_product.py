"""Products of few rows past oneDNN give the same numbers, row by row, and only where the weights are laid out so."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from swarm.serving.model import packing, row_product
from swarm.serving.model.packing import PackedLinear, can_pack
from torch import nn

pytestmark = pytest.mark.skipif(
    not can_pack() or packing.few_rows() is None, reason="no such products on this processor"
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("num_in", "num_out"), [(11, 130), (16, 64), (63, 65), (64, 37), (65, 63), (512, 1704)])
def test_product_of_any_shape_is_that_of_the_plain_layer(num_in: int, num_out: int, bias: bool) -> None:
    plain = linear(num_in, num_out, bias=bias)
    packed = PackedLinear(plain)
    for num_rows in (1, 2, 3, 4, 5, 7, 8, 13, 16, 64):
        x = torch.randn(num_rows, num_in)
        assert packed.takes(num_rows)
        expected = plain.double()(x.double()).float()
        plain.float()
        torch.testing.assert_close(torch.from_numpy(packed.product(x.numpy())), expected, rtol=1e-5, atol=1e-5)


def test_product_a_row_is_the_same_alone_and_beside_any_others() -> None:
    packed = PackedLinear(linear(1704, 512))
    x = np.random.default_rng(0).standard_normal((64, 1704), np.float32)
    together = packed.product(x)
    for num_rows in range(1, 64):
        assert np.array_equal(packed.product(x[:num_rows]), together[:num_rows])
    for row in range(64):
        assert np.array_equal(packed.product(x[row : row + 1])[0], together[row])


def test_product_keeps_what_is_not_finite_in_its_own_row() -> None:
    packed = PackedLinear(linear(96, 100))
    for bad in (np.nan, np.inf):
        x = np.ones((6, 96), np.float32)
        x[4, 95] = bad
        finite = np.isfinite(packed.product(x))
        assert not finite[4].any()
        assert finite[[0, 1, 2, 3, 5]].all()


def test_packed_linear_few_rows_on_one_thread_go_past_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedLinear(linear(32, 48))
    past = Mock(side_effect=packed.product)
    monkeypatch.setattr(packed, "product", past)
    for shape in ((32,), (1, 64, 32), (65, 32)):
        packed(torch.randn(shape))
    assert [len(call.args[0]) for call in past.call_args_list] == [1, 64]
    torch.set_num_threads(2)
    packed(torch.randn(4, 32))
    packed(torch.randn(4, 32).bfloat16().float())
    assert past.call_count == 2


def test_packed_linear_rows_that_do_not_follow_one_another_in_memory_are_the_plain_ones() -> None:
    plain = linear(32, 48)
    x = torch.randn(32, 6).t()
    torch.testing.assert_close(PackedLinear(plain)(x), plain(x))


def test_packed_linear_whose_weight_is_laid_out_otherwise_computes_through_onednn() -> None:
    """As for one row, where it rounds nothing up."""
    assert row_product.panels(torch.ops.mkldnn._reorder_linear_weight(torch.randn(37, 33), 1), 33, 37) is None
    assert PackedLinear(linear(32, 48).bfloat16())._panels is None


def test_few_rows_on_another_processor_or_without_numba_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx2": True})
        assert row_product.load() is None
    monkeypatch.setattr(row_product, "load", Mock(side_effect=OSError("no libllvmlite")))
    assert packing.few_rows.__wrapped__() is None
    assert "no libllvmlite" in caplog.text


def test_packed_linear_without_them_computes_through_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "few_rows", lambda: None)
    plain = linear(32, 48)
    packed = PackedLinear(plain)
    assert not packed.takes(1)
    x = torch.randn(3, 32)
    torch.testing.assert_close(packed(x), plain(x))
