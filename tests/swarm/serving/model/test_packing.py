"""Packed linear layers compute what plain ones compute, and take no more memory."""

from __future__ import annotations

import copy

import pytest
import torch
from swarm.serving.model import packing
from swarm.serving.model.packing import PackedLinear, can_pack, pack_linears
from torch import nn

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="no packed kernels on this processor")


def linear(num_in: int, num_out: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(num_in, num_out, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (13, 64), (16, 64), (2, 300, 64)])
def test_packed_linear_gives_the_rows_of_the_plain_layer(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype, error: float
) -> None:
    if not can_pack(dtype):
        pytest.skip("no packed kernels of bfloat16 on this processor")
    plain = linear(64, 37, bias=bias, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(PackedLinear(plain.weight, plain.bias)(x), plain(x), rtol=error, atol=error)


def test_bfloat16_layers_stay_plain_on_a_processor_without_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model = nn.Sequential(linear(8, 8, bias=True, dtype=torch.bfloat16), linear(8, 8, bias=True))
    pack_linears(model)
    assert [type(layer) for layer in model] == [nn.Linear, PackedLinear]


def test_packed_linear_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    packed = PackedLinear(linear(512, 1704, bias=False).weight, None)
    x = torch.randn(16, 512)
    together = packed(x)
    for row in range(16):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])


def test_packed_linear_rows_of_a_wide_input_do_not_depend_on_their_number() -> None:
    """A row alone may differ in the last bit."""
    packed = PackedLinear(linear(1704, 512, bias=False).weight, None)
    x = torch.randn(64, 1704)
    together = packed(x)
    for num_rows in range(2, 64):
        assert torch.equal(packed(x[:num_rows]), together[:num_rows])
    torch.testing.assert_close(packed(x[:1]), together[:1])


def test_packed_linear_uses_few_programs_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps a program for each number of rows that it meets, and takes milliseconds to make one."""
    sizes = set[int]()

    def product(rows: torch.Tensor, *_: object) -> torch.Tensor:
        sizes.add(len(rows))
        return torch.zeros(len(rows), 8)

    packed = PackedLinear(linear(4, 8, bias=False).weight, None)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    for num_rows in range(1, 1100):
        assert packed(torch.zeros(num_rows, 4)).shape == (num_rows, 8)
    assert len(sizes) <= 17
    assert max(sizes) == 512


def test_packed_linear_gives_the_input_gradient_of_the_plain_layer() -> None:
    plain = linear(48, 80, bias=True)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(3, 5, 48)
    grad = torch.randn(3, 5, 80)
    grads = []
    for module in (plain, packed):
        inputs = x.clone().requires_grad_()
        module(inputs).backward(grad)
        grads.append(inputs.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_pack_linears_leaves_shared_and_special_layers_as_they_are() -> None:
    class Own(nn.Linear):
        """A layer that may use its weight in any other form."""

    embedding = nn.Embedding(32, 16)
    head = nn.Linear(16, 32, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head, "own": Own(16, 16), "plain": nn.Linear(16, 16)})
    pack_linears(model.requires_grad_(False))
    assert type(model["head"]) is nn.Linear
    assert type(model["own"]) is Own
    assert isinstance(model["plain"], PackedLinear)
    assert sum(parameter.numel() for parameter in model["plain"].parameters()) == 16 * 16 + 16


def attention(num_in: int, *, bias: bool = False) -> nn.ModuleDict:
    names = {"q_proj": 48, "k_proj": 16, "v_proj": 16, "o_proj": 32}
    return nn.ModuleDict({name: linear(num_in, num_out, bias=bias) for name, num_out in names.items()})


@pytest.mark.parametrize("bias", [True, False])
def test_pack_linears_computes_layers_of_the_same_rows_in_one_product(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = attention(32, bias=bias)
    packed = copy.deepcopy(plain)
    pack_linears(packed)
    assert sum(p.numel() for p in packed.parameters()) == sum(p.numel() for p in plain.parameters())
    num_products = 0
    product = torch.ops.mkldnn._linear_pointwise

    def counted(*args: object) -> torch.Tensor:
        nonlocal num_products
        num_products += 1
        out: torch.Tensor = product(*args)
        return out

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    for num_rows in (1, 5):
        x = torch.randn(2, num_rows, 32)
        for name in ("q_proj", "k_proj", "v_proj"):
            out = packed[name](x)
            assert out.is_contiguous()
            torch.testing.assert_close(out, plain[name](x))
    assert num_products == 2


def test_pack_linears_computes_the_right_rows_when_layers_get_different_ones() -> None:
    plain = attention(32)
    packed = copy.deepcopy(plain)
    pack_linears(packed)
    x, other = torch.randn(3, 32), torch.randn(3, 32)
    for name, rows in [("q_proj", x), ("k_proj", other), ("v_proj", x), ("q_proj", other), ("q_proj", other)]:
        torch.testing.assert_close(packed[name](rows), plain[name](rows))


def test_pack_linears_gives_plain_gradients_through_layers_of_the_same_rows() -> None:
    plain = attention(32)
    packed = copy.deepcopy(plain)
    pack_linears(packed)
    x = torch.randn(3, 32)
    grads = []
    for module in (plain, packed):
        inputs = x.clone().requires_grad_()
        sum((module[name](inputs) ** 2).sum() for name in ("q_proj", "k_proj", "v_proj")).backward()
        grads.append(inputs.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_pack_linears_leaves_large_layers_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory would hold their copies as well while they are packed."""
    monkeypatch.setattr(packing, "_JOINED_BYTES", 4 * 32 * (48 + 16 + 16) - 1)
    packed = attention(32)
    pack_linears(packed)
    assert all(isinstance(module, PackedLinear) for module in packed.values())
