"""MXFP4 as gpt-oss keeps its experts (`quant_method` "mxfp4"): 32 values of 4 bits with one power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023, section 5.3.2; OpenAI 2025, arXiv:2508.10925.
Legend of shapes: E experts, O outputs, I inputs, which are G groups of 32 values in 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swarm.serving.model.formats.format import Shape, check_part
from swarm.serving.model.safetensors_reader import StoredTensor

_GROUP_BYTES = 16

_CODES, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Every weight of a checkpoint is kept in the same way."""

    endings: ClassVar[Mapping[str, str]] = MappingProxyType({_CODES: "", _SCALES: ""})
    needed: ClassVar[tuple[str, ...]] = (_CODES, _SCALES)

    @classmethod
    def from_config(cls, _config: Mapping[str, Any]) -> Mxfp4:
        return cls()

    def num_values(self, sizes: Mapping[str, int]) -> int:
        return 2 * sizes[_CODES]

    def shape(self, parts: Mapping[str, StoredTensor]) -> Shape:
        shape = check_part(parts, _CODES, [torch.uint8])
        if len(shape) != 4 or shape[-1] != _GROUP_BYTES:
            raise ValueError(f"{parts[_CODES].name} has the shape {list(shape)}, not experts of groups of 16 bytes")
        check_part(parts, _SCALES, [torch.uint8], shape[:-1])
        num_experts, num_out, num_groups, _ = shape
        return num_experts, num_groups * 2 * _GROUP_BYTES, num_out

    def weight(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        """One expert after another: the library makes copies of what it is given."""
        weight_EIO = torch.empty(shape, dtype=dtype)
        for into_IO, codes, scales in zip(weight_EIO, parts[_CODES], parts[_SCALES], strict=True):
            into_IO.copy_(convert_moe_packed_tensors(codes[None], scales[None], dtype=dtype)[0])
        return weight_EIO
