"""Weights of 8 or 4 bits in place of a span's linear layers; what is computed with them is bfloat16.

By torchao, but for 8 bits on CPUs, where it makes a whole weight bfloat16 at each step: there by `int8_rows`.

Only weights: rows of int8 with a scale each, or groups of 32 int4 with a scale and an offset. Embedding, head, norms
and whatever is no linear layer stay as they are; a family with most of its values elsewhere (GPT-2, fused experts) is
refused, for it would not become smaller. A device without kernels for 4 bits is refused too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeGuard

import torch
from swarm_protocol.errors import ConfigError
from torch import nn

from swarm.heap import give_back
from swarm.serving.model.int8_rows import make_int8

Bits = Literal["int8", "int4"]

GROUP = 32

_INT8_ROW_BYTES = 5
_INT4_GROUP_BYTES = 4

PASSING_BYTES = 8
"""What the library takes for each value of the tensor that it makes smaller, beside that tensor: measured."""

_MIN_SHARE = 0.5


def quantize(model: Any, blocks: nn.ModuleList, bits: Bits) -> None:
    """Replace the weights of the linear layers in `blocks`. Raises ConfigError if they cannot be."""
    family = model.config.model_type
    linear = {name: module.weight.numel() for name, module in blocks.named_modules() if is_quantizable(module)}
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
    except Exception as error:  # a library that differs by device and version in what it lacks
        raise ConfigError(
            f"{bits} weights do not work on this device: {' '.join(str(error).split())[:200]}",
            remedy="serve in bfloat16",
        ) from error


def quantized_bytes(bits: Bits, num_values: int, num_rows: int) -> int:
    """What a weight takes with its scales and offsets."""
    if bits == "int8":
        return num_values + _INT8_ROW_BYTES * num_rows
    return num_values // 2 + _INT4_GROUP_BYTES * (num_values // GROUP)


def is_quantizable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Not a subclass, which may read its weight in its own way."""
    return type(module) is nn.Linear and module.in_features % GROUP == 0


def _torchao(bits: Bits, device: torch.device) -> tuple[Any, Any]:
    """Its function and what to call it with. Imported here, for it takes a second, and only who quantizes needs it."""
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
