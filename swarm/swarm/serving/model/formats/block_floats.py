"""Small floats with one scale per block: FP8 (`quant_method` "fp8") and MXFP4 ("mxfp4").

FP8, as in DeepSeek's and Qwen's checkpoints (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2): the value of row i and
column j is multiplied by the scale at [i // rows, j // columns], where (rows, columns) is `weight_block_size`. The last
block of a row or column may be partial. transformers' Fp8Dequantize divides a weight evenly among its scales, which is
wrong if a block is partial. Shapes: R rows, C columns; r, c their numbers of blocks.

MXFP4, as gpt-oss keeps its experts (OCP Microscaling Formats (MX) Specification 1.0, 2023, section 5.3.2; OpenAI 2025,
arXiv:2508.10925): 32 values of 4 bits with one power of two. Shapes: E experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from swarm_protocol.checks import check_int
from torch import Tensor

from swarm.serving.model.formats.format import FLOATS, Shape, check_part
from swarm.serving.model.safetensors_reader import StoredTensor

_MAX_BLOCK = 2**20
_ROWS = 128
"""Rows computed at once if a weight has one scale."""

_SCALES = "_scale_inv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """FP8 weights. `block` is rows and columns of a block; None: one scale for a weight."""

    block: tuple[int, int] | None
    endings: ClassVar[Mapping[str, str]] = {_SCALES: "", ".activation_scale": ".weight"}
    needed: ClassVar[tuple[str, ...]] = ("", _SCALES)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Fp8:
        """Return the format. Raises ValueError for an invalid block size."""
        size = config.get("weight_block_size", (128, 128))
        if size is None:
            return cls(block=None)
        if not isinstance(size, list | tuple) or len(size) != 2:
            raise ValueError("weight_block_size is not a pair of whole numbers")
        rows, columns = (check_int(one, "weight_block_size", low=1, high=_MAX_BLOCK) for one in size)
        return cls(block=(rows, columns))

    def num_values(self, sizes: Mapping[str, int]) -> int:
        return sizes[""]

    def shape(self, parts: Mapping[str, StoredTensor]) -> Shape:
        shape = check_part(parts, "", [torch.float8_e4m3fn, torch.float8_e5m2])
        scales = check_part(parts, _SCALES, [*FLOATS, torch.float8_e8m0fnu])
        if len(shape) < 2:
            raise ValueError(f"{parts[''].name} is not a matrix")
        if self.block is None:
            expected: tuple[Shape, ...] = ((), (1,), (*shape[:-2], 1, 1))
        else:
            rows, columns = self.block
            expected = ((*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns)),)
        if scales not in expected:
            raise ValueError(f"{parts[_SCALES].name} has the shape {list(scales)}, not {list(expected[-1])}")
        return shape

    def weight(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        rows, columns = self.block or (_ROWS, shape[-1])
        codes_BRC = parts[""].view(-1, *shape[-2:])
        scales_Brc = parts[_SCALES].float()
        if self.block is None:
            num_scaled = -(-shape[-2] // rows)
            scales_Brc = scales_Brc.view(-1, 1, 1).expand(len(codes_BRC), num_scaled, 1)
        weight_BRC = torch.empty(codes_BRC.shape, dtype=dtype)
        for into_RC, codes_RC, scales_rc in zip(
            weight_BRC, codes_BRC, scales_Brc.reshape(len(codes_BRC), *scales_Brc.shape[-2:]), strict=True
        ):
            for i, scales_c in enumerate(scales_rc):
                scales_C = scales_c.repeat_interleave(columns)[: shape[-1]]
                some = slice(i * rows, (i + 1) * rows)
                into_RC[some] = codes_RC[some].float() * scales_C
        return weight_BRC.view(shape)


_GROUP_BYTES = 16

_MX_CODES, _MX_SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4 weights. All have the same layout."""

    endings: ClassVar[Mapping[str, str]] = {_MX_CODES: "", _MX_SCALES: ""}
    needed: ClassVar[tuple[str, ...]] = (_MX_CODES, _MX_SCALES)

    @classmethod
    def from_config(cls, _config: Mapping[str, Any]) -> Mxfp4:
        return cls()

    def num_values(self, sizes: Mapping[str, int]) -> int:
        return 2 * sizes[_MX_CODES]

    def shape(self, parts: Mapping[str, StoredTensor]) -> Shape:
        shape = check_part(parts, _MX_CODES, [torch.uint8])
        if len(shape) != 4 or shape[-1] != _GROUP_BYTES:
            raise ValueError(f"{parts[_MX_CODES].name} has the shape {list(shape)}, not experts of groups of 16 bytes")
        check_part(parts, _MX_SCALES, [torch.uint8], shape[:-1])
        num_experts, num_out, num_groups, _ = shape
        return num_experts, num_groups * 2 * _GROUP_BYTES, num_out

    def weight(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return the weight, computed one expert after another, since the library copies its inputs."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: PLC0415 (over two seconds)

        weight_EIO = torch.empty(shape, dtype=dtype)
        for into_IO, codes, scales in zip(weight_EIO, parts[_MX_CODES], parts[_MX_SCALES], strict=True):
            into_IO.copy_(convert_moe_packed_tensors(codes[None], scales[None], dtype=dtype)[0])
        return weight_EIO
