"""Tiny checkpoints in the formats of `swarm.serving.model.formats`, quantized here by the formats' definitions.

Each has a plain checkpoint with the values of its codes and scales.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]

FP8_BLOCK = (16, 24)
"""The block of weights with 32 and 64 columns: it is cut off at the end of each row."""

GROUP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """The stored parts of a weight, by the text that replaces "weight" in its name, and the values of the codes."""

    parts: Parts
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A format; `name` matches the names of the quantized weights."""

    config: Mapping[str, Any]
    quantize: Callable[[Tensor], Quantized]
    name: str = r"_proj\.weight$"


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


def _packed(codes: Tensor, bits: int, places: Sequence[int]) -> Tensor:
    """Return words of 32 bits along the last dimension, where code `places[i]` of a word is in its i-th place."""
    codes = codes.long().unflatten(-1, (-1, len(places)))
    words = sum(codes[..., place] << (bits * i) for i, place in enumerate(places))
    assert isinstance(words, Tensor)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def _grouped(weight: Tensor, bits: int, group_I: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes [I, O], scales and zeros [G, O], and values [O, I]."""
    weight_IO, most = weight.T, 2**bits - 1
    num_groups = int(group_I.max()) + 1
    low, high = (
        torch.stack([pick(weight_IO[group_I == g], 0) for g in range(num_groups)]) for pick in (torch.amin, torch.amax)
    )
    scales_GO = ((high - low) / most).half()
    zeros_GO = (-low / scales_GO).round().clamp(1, most)
    codes_IO = (weight_IO / scales_GO[group_I] + zeros_GO[group_I]).round().clamp(0, most)
    values_IO = scales_GO[group_I].float() * (codes_IO - zeros_GO[group_I])
    return codes_IO, scales_GO, zeros_GO, values_IO.T


def _gptq(weight: Tensor, bits: int, *, stored_less: int, is_shuffled: bool = False) -> Quantized:
    group_I = torch.arange(weight.shape[1]) // GROUP
    if is_shuffled:
        group_I = group_I[torch.randperm(len(group_I), generator=torch.Generator().manual_seed(0))]
    codes_IO, scales_GO, zeros_GO, values_OI = _grouped(weight, bits, group_I)
    places = range(32 // bits)
    parts = {
        "qweight": _packed(codes_IO.T, bits, places).T,
        "qzeros": _packed(zeros_GO - stored_less, bits, places),
        "scales": scales_GO,
        "g_idx": group_I.to(torch.int32),
    }
    return Quantized(parts=parts, values=values_OI)


def _awq(weight: Tensor) -> Quantized:
    codes_IO, scales_GO, zeros_GO, values_OI = _grouped(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # in AutoAWQ's order
    parts = {"qweight": _packed(codes_IO, 4, order), "qzeros": _packed(zeros_GO, 4, order), "scales": scales_GO}
    return Quantized(parts=parts, values=values_OI)


def _int8_rows(weight: Tensor) -> Quantized:
    largest_O = weight.abs().amax(1)
    codes = (weight / largest_O[:, None] * 127).round().to(torch.int8)
    parts = {"weight": codes, "SCB": largest_O, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Quantized(parts=parts, values=codes.float() * (largest_O[:, None] / 127))


def _four_bits(weight: Tensor, kind: str, table: Tensor, *, is_nested: bool) -> Quantized:
    """Quantize in blocks of 64 values."""
    blocks = weight.reshape(-1, 64)
    scales_B = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    nested: Parts = {}
    if is_nested:
        offset = float(scales_B.mean())
        map_256 = torch.linspace(-1, 1, 256)
        groups = (scales_B - offset).split(16)
        nested_scales = torch.stack([group.abs().max() for group in groups])
        codes_B = torch.cat(
            [_nearest(group / scale, map_256) for group, scale in zip(groups, nested_scales, strict=True)]
        )
        scales_B = (
            torch.cat([map_256[c.long()] * s for c, s in zip(codes_B.split(16), nested_scales, strict=True)]) + offset
        )
        nested = {"weight.nested_absmax": nested_scales, "weight.nested_quant_map": map_256, "weight.absmax": codes_B}
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
    codes = _nearest(blocks / scales_B[:, None], table)
    pairs = codes.view(-1, 2)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts = {
        "weight": (pairs[:, :1] << 4) | pairs[:, 1:],
        "weight.absmax": scales_B,
        "weight.quant_map": table.clone(),
        f"weight.quant_state.bitsandbytes__{kind}": text,
    }
    return Quantized(parts=parts | nested, values=(table[codes.long()] * scales_B[:, None]).view_as(weight))


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values[..., None] - table).abs().argmin(-1).to(torch.uint8)


def _mxfp4(weight_EIO: Tensor) -> Quantized:
    groups = weight_EIO.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = _nearest(groups / exponents.exp2()[..., None], FP4)
    parts = {
        "_blocks": codes[..., ::2] | codes[..., 1::2] << 4,
        "_scales": (exponents + 127).to(torch.uint8),
    }
    values = FP4[codes.long()] * exponents.exp2()[..., None]
    return Quantized(parts=parts, values=values.flatten(2).transpose(1, 2))


NF4 = torch.tensor([
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
])  # fmt: skip
FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
_BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}

KINDS: dict[str, Kind] = {
    "fp8": Kind(
        config={"quant_method": "fp8", "weight_block_size": list(FP8_BLOCK), "activation_scheme": "dynamic"},
        quantize=lambda weight: _fp8(weight, FP8_BLOCK),
    ),
    "fp8-one-scale": Kind(
        config={"quant_method": "fp8", "weight_block_size": None}, quantize=lambda weight: _fp8(weight, None)
    ),
    "gptq": Kind(config=_GPTQ, quantize=lambda weight: _gptq(weight, 4, stored_less=1)),
    "gptq-8-shuffled": Kind(
        config=_GPTQ | {"bits": 8, "desc_act": True},
        quantize=lambda weight: _gptq(weight, 8, stored_less=1, is_shuffled=True),
    ),
    "gptq-v2": Kind(
        config=_GPTQ | {"checkpoint_format": "gptq_v2"}, quantize=lambda weight: _gptq(weight, 4, stored_less=0)
    ),
    "awq": Kind(
        config={"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        quantize=_awq,
    ),
    "bnb-int8": Kind(config={"quant_method": "bitsandbytes", "load_in_8bit": True}, quantize=_int8_rows),
    "bnb-nf4": Kind(
        config=_BNB4 | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        quantize=lambda weight: _four_bits(weight, "nf4", NF4, is_nested=True),
    ),
    "bnb-fp4": Kind(
        config=_BNB4 | {"bnb_4bit_quant_type": "fp4"},
        quantize=lambda weight: _four_bits(weight, "fp4", FP4 / 6, is_nested=False),
    ),
    "mxfp4": Kind(config={"quant_method": "mxfp4"}, quantize=_mxfp4, name=r"experts\.\w+_proj$"),
}


def write_quantized(source: Path, into: Path, plain: Path, kind: str) -> None:
    """Quantize weights of the checkpoint `source` into the checkpoint `into`; `plain` gets the values of the codes."""
    stored: Parts = {}
    values: Parts = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            values[name] = stored[name] = tensor
            if re.search(KINDS[kind].name, name):
                quantized = KINDS[kind].quantize(stored.pop(name))
                stored |= {name.removesuffix("weight") + part: value for part, value in quantized.parts.items()}
                values[name] = quantized.values
    config = json.loads((source / "config.json").read_text())
    write_checkpoint(into, config | {"quantization_config": dict(KINDS[kind].config)}, stored)
    write_checkpoint(plain, config, values)


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Parts) -> None:
    """Write the checkpoint in two files."""
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
