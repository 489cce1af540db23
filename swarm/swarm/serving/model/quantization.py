"""Replaces the weights of a span's linear layers by 8-bit or 4-bit ones; products are computed in bfloat16.

int8 on a CPU uses `Int8Linear` below: rows of int8 with one scale each, half of bfloat16's bytes. For up to 16 rows it
uses torch's product for such weights, which reads them once and is at least as fast as bfloat16's. For more rows that
product is slower, so the weights are converted to bfloat16 piece by piece, never all at once. torchao, which converts a
whole weight at each step, is used for int8 on accelerators, and for int4 in groups of 32 with a scale and an offset.

Only linear layers change, not embedding, head and norms. A family with most of its values outside of them (GPT-2, fused
experts) is refused, since it would not shrink, and so is a device without 4-bit kernels. Shapes: N rows, I
inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeGuard

import torch
from swarm_protocol.errors import ConfigError, one_line
from torch import Tensor, nn

from swarm.heap import give_back

_INT8_MAX = 127

_FEW_ROWS = 16
"""Maximum rows for which torch's int8 product is faster."""

_OUTPUTS = 1024
"""Outputs whose weights are converted to bfloat16 at once: some megabytes, which stay in a cache."""

Bits = Literal["int8", "int4"]

GROUP = 32

_INT8_ROW_BYTES = 5

_INT4_GROUP_BYTES = 4

_INT4_OUTPUTS = 16
"""On a CPU, a layer with 4-bit weights must have a multiple of this number of outputs."""

PASSING_BYTES = 8
"""Bytes that torchao needs for each value of a tensor while it quantizes it, in addition to the tensor, as measured."""

_MIN_SHARE = 0.5


class Int8Linear(nn.Module):
    """A frozen int8 copy of an nn.Linear: x [..., I] -> [..., O]."""

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
            out: Tensor = _Int8Product.apply(x, self.codes, self.scales)  # type: ignore[no-untyped-call]
        else:
            out = _product(x, self.codes, self.scales)
        return out if self.bias is None else out + self.bias


def make_int8(blocks: nn.Module, names: Iterable[str]) -> None:
    """Replace the linear layers `names` in `blocks`, one by one, so that few weights are in memory twice."""
    for name in names:
        linear = blocks.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        blocks.set_submodule(name, Int8Linear(linear))
        del linear
        give_back()


class _Int8Product(torch.autograd.Function):
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
    """Return codes and scales. The scales are rounded to the weight's dtype before they are used."""
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.int8)
    scales_O = torch.empty(len(weight_OI), dtype=weight_OI.dtype)
    for weights, codes, scales in zip(
        torch.split(weight_OI, _OUTPUTS), torch.split(codes_OI, _OUTPUTS), torch.split(scales_O, _OUTPUTS), strict=True
    ):
        largest = weights.abs().amax(1)
        scales.copy_(torch.where(largest > 0, largest.float() / _INT8_MAX, 1.0))
        codes.copy_((weights.float() / scales.float()[:, None]).round().clamp(-_INT8_MAX, _INT8_MAX))
    return codes_OI, scales_O


def quantize(model: Any, blocks: nn.ModuleList, bits: Bits) -> None:
    """Quantize the weights of the linear layers in `blocks`. Raises ConfigError if that is not possible."""
    family = model.config.model_type
    linear = {name: module.weight.numel() for name, module in blocks.named_modules() if is_quantizable(module, bits)}
    if sum(linear.values()) < _MIN_SHARE * sum(parameter.numel() for parameter in blocks.parameters()):
        raise ConfigError(f"{family} has most of its weights outside of linear layers", remedy="serve it in bfloat16")
    device = next(blocks.parameters()).device
    if bits == "int8" and device.type == "cpu":
        make_int8(blocks, linear)
    else:
        _quantize_by_torchao(blocks, linear, bits, device)


def _quantize_by_torchao(blocks: nn.ModuleList, names: Iterable[str], bits: Bits, device: torch.device) -> None:
    try:
        apply, config = _torchao(bits, device)
        for name in names:
            apply(blocks, config, filter_fn=lambda _module, full_name, name=name: full_name == name)
            give_back()
    except ModuleNotFoundError as error:
        raise ConfigError(f"{bits} weights need {error.name}", remedy="install it: pip install torchao") from error
    except Exception as error:  # what the library lacks differs by device and version
        raise ConfigError(
            f"{bits} weights do not work on this device: {one_line(error)}",
            remedy="serve in bfloat16",
        ) from error


def quantized_bytes(bits: Bits, num_values: int, num_rows: int) -> int:
    """Return the bytes of a quantized weight with its scales and offsets."""
    if bits == "int8":
        return num_values + _INT8_ROW_BYTES * num_rows
    return num_values // 2 + _INT4_GROUP_BYTES * (num_values // GROUP)


def is_quantizable(module: nn.Module, bits: Bits) -> TypeGuard[nn.Linear]:
    """Return whether the module is a plain linear layer of a size that the kernels support. A subclass may use its
    weight in another way."""
    if type(module) is not nn.Linear or module.in_features % GROUP:
        return False
    return bits == "int8" or module.out_features % _INT4_OUTPUTS == 0


def _torchao(bits: Bits, device: torch.device) -> tuple[Any, Any]:
    """Return torchao's function and its argument. Imported here, since it takes a second and is rarely needed."""
    from torchao.quantization import (  # type: ignore[import-untyped]  # noqa: PLC0415
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    if bits == "int8":
        return quantize_, Int8WeightOnlyConfig()
    if device.type != "cpu":
        return quantize_, Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    from torchao.prototype.quantization.int4 import (  # type: ignore[import-untyped]  # noqa: PLC0415
        PrototypeInt4WeightOnlyConfig,
    )

    return quantize_, PrototypeInt4WeightOnlyConfig(group_size=GROUP)
