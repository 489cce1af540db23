"""Linear layers with int8 weights and a scale for each row of them, on CPUs: half of bfloat16's bytes.

A few rows go through torch's product for such weights, which reads them once and is at least as fast as bfloat16's. It
computes more slowly than bfloat16's once there are many, so that for prompts the weights become bfloat16 first, some
outputs at a time: the whole weight never is.
Legend of shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from swarm.heap import give_back

_INT8_MAX = 127

_FEW_ROWS = 16
"""Up to here torch's product is the faster way."""

_OUTPUTS = 1024
"""Made bfloat16 at once: some megabytes, which stay in a cache."""


class Int8Linear(nn.Module):
    """As the nn.Linear that it is made from, frozen: x [..., I] -> [..., O]."""

    codes: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        codes_OI, scales_O = _quantized(linear.weight.detach())
        self.register_buffer("codes", codes_OI)
        self.scales = nn.Parameter(scales_O, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            out: Tensor = _Differentiable.apply(x, self.codes, self.scales)  # type: ignore[no-untyped-call]
        else:
            out = _product(x, self.codes, self.scales)
        return out if self.bias is None else out + self.bias


def make_int8(blocks: nn.Module, names: Iterable[str]) -> None:
    """Replace the linear layers of these `names` in `blocks`, one by one, so that few weights are in memory twice."""
    for name in names:
        linear = blocks.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        blocks.set_submodule(name, Int8Linear(linear))
        del linear
        give_back()


class _Differentiable(torch.autograd.Function):
    """The product, with the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.weight = codes, scales
        return _product(x, codes, scales)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        codes_OI, scales_O = ctx.weight
        return (grad * scales_O) @ codes_OI.to(grad.dtype), None, None


def _product(x: Tensor, codes_OI: Tensor, scales_O: Tensor) -> Tensor:
    rows_NI = x.reshape(-1, x.shape[-1])
    if len(rows_NI) <= _FEW_ROWS:
        out_NO = torch._weight_int8pack_mm(rows_NI.contiguous(), codes_OI, scales_O)
    else:
        out_NO = rows_NI.new_empty(len(rows_NI), len(codes_OI))
        for into_NO, codes, scales in zip(
            torch.split(out_NO, _OUTPUTS, 1),
            torch.split(codes_OI, _OUTPUTS),
            torch.split(scales_O, _OUTPUTS),
            strict=True,
        ):
            torch.mul(rows_NI @ codes.to(rows_NI.dtype).T, scales, out=into_NO)
    return out_NO.view(*x.shape[:-1], -1)


def _quantized(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales. The scales are rounded to the weight's type before they are used."""
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.int8)
    scales_O = torch.empty(len(weight_OI), dtype=weight_OI.dtype)
    for weights, codes, scales in zip(
        torch.split(weight_OI, _OUTPUTS), torch.split(codes_OI, _OUTPUTS), torch.split(scales_O, _OUTPUTS), strict=True
    ):
        largest = weights.abs().amax(1)
        scales.copy_(torch.where(largest > 0, largest.float() / _INT8_MAX, 1.0))
        codes.copy_((weights.float() / scales.float()[:, None]).round().clamp(-_INT8_MAX, _INT8_MAX))
    return codes_OI, scales_O
