"""Tiny checkpoints in the formats of `swarm.serving.model.formats`, quantized here by the formats' definitions.

Beside each there is a plain checkpoint of the values that its codes and scales stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]

FP8_BLOCK = (16, 24)
"""Of weights with 32 and 64 columns: a block is cut off at the end of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Stored tensors in place of `x.weight`, by their names after `x.`, and the values that they stand for."""

    parts: Parts
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    config: Mapping[str, Any]
    quantize: Callable[[Tensor], Quantized]


def _fp8(weight: Tensor, block: tuple[int, int] | None) -> Quantized:
    rows, columns = block or weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    values = torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[where].abs().max() / 448
            codes[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
            values[where] = codes[where].float() * scales[i, j]
    stored = scales if block else scales.reshape(())
    return Quantized(parts={"weight": codes, "weight_scale_inv": stored}, values=values)


KINDS: dict[str, Kind] = {
    "fp8": Kind(
        config={"quant_method": "fp8", "weight_block_size": list(FP8_BLOCK), "activation_scheme": "dynamic"},
        quantize=lambda weight: _fp8(weight, FP8_BLOCK),
    ),
    "fp8-one-scale": Kind(
        config={"quant_method": "fp8", "weight_block_size": None}, quantize=lambda weight: _fp8(weight, None)
    ),
}


def write_quantized(source: Path, into: Path, plain: Path, kind: str) -> None:
    """Quantize the linear layers of the blocks of `source` into the checkpoint `into`; `plain` gets their values."""
    stored: Parts = {}
    values: Parts = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            values[name] = stored[name] = tensor
            if "_proj." in name:
                quantized = KINDS[kind].quantize(stored.pop(name))
                stored |= {name.removesuffix("weight") + part: value for part, value in quantized.parts.items()}
                values[name] = quantized.values
    config = json.loads((source / "config.json").read_text())
    write_checkpoint(into, config | {"quantization_config": dict(KINDS[kind].config)}, stored)
    write_checkpoint(plain, config, values)


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Parts) -> None:
    """In two files."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {}
    for index, some in enumerate((names[::2], names[1::2])):
        file = f"model-{index + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in some}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    index_text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index_text)
