"""bitsandbytes' weights (`quant_method` "bitsandbytes"): rows of int8, or blocks of 4-bit codes, NF4 or FP4.

Sources: Dettmers et al. 2022, arXiv:2208.07339 (int8); 2023, arXiv:2305.14314, section 3 (NF4, and quantized scales),
as bitsandbytes 0.43 and later store them, with the values of the codes in the checkpoint. Shapes: O outputs,
I inputs, N values of a weight, B blocks of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from swarm_protocol.checks import check_choice, check_float, check_int
from torch import Tensor

from swarm.serving.model.formats.format import CheckpointFormat, Shape, check_part
from swarm.serving.model.safetensors_reader import StoredTensor

_INT8_MAX = 127
_ROWS = 128
_BLOCKS = 1024
"""Blocks computed at once."""

_MAX_BLOCK = 4096
_MAX_STATE_BYTES = 4096
_MAX_OFFSET = 1e6

_ROW_SCALES, _LAYOUT = ".SCB", ".weight_format"
_SCALES, _MAP = ".absmax", ".quant_map"
_NESTED_SCALES, _NESTED_MAP = ".nested_absmax", ".nested_quant_map"


def bitsandbytes(config: Mapping[str, Any]) -> CheckpointFormat:
    """Return the format of a `quantization_config`. Raises ValueError if it is neither of the two."""
    if config.get("load_in_4bit") is True:
        return FourBitWeight(
            kind=check_choice(config.get("bnb_4bit_quant_type"), "bnb_4bit_quant_type", {"nf4", "fp4"})
        )
    if config.get("load_in_8bit") is True:
        return Int8Weight()
    raise ValueError("neither load_in_8bit nor load_in_4bit is true")


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Int8 weights. Each row of codes has a scale: its largest magnitude."""

    endings: ClassVar[Mapping[str, str]] = {_ROW_SCALES: ".weight", _LAYOUT: ".weight"}
    needed: ClassVar[tuple[str, ...]] = ("", _ROW_SCALES)

    def num_values(self, sizes: Mapping[str, int]) -> int:
        return sizes[""]

    def shape(self, parts: Mapping[str, StoredTensor]) -> Shape:
        shape = check_part(parts, "", [torch.int8])
        if len(shape) != 2:
            raise ValueError(f"{parts[''].name} has the shape {list(shape)}, which is not a matrix")
        check_part(parts, _ROW_SCALES, [torch.float32], shape[:1])
        if _LAYOUT in parts and math.prod(check_part(parts, _LAYOUT, [torch.uint8])) != 1:
            raise ValueError(f"{parts[_LAYOUT].name} is not one number")
        return shape

    def weight(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        if _LAYOUT in parts and parts[_LAYOUT].item():
            raise ValueError("its rows are laid out for one kind of GPU")
        weight_OI = torch.empty(shape, dtype=dtype)
        scales_O1 = parts[_ROW_SCALES][:, None] / _INT8_MAX
        pieces = [torch.split(whole, _ROWS) for whole in (weight_OI, parts[""], scales_O1)]
        for into, codes, scales in zip(*pieces, strict=True):
            into.copy_(codes.float() * scales)
        return weight_OI


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The settings stored with a 4-bit weight. `nested_block` is 0 if the scales are not quantized."""

    shape: Shape
    block: int
    nested_block: int
    nested_offset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitWeight:
    """4-bit weights: two codes in a byte, the first in its upper half. Each block has a scale: its largest
    magnitude."""

    kind: str

    @property
    def endings(self) -> Mapping[str, str]:
        return dict.fromkeys((_SCALES, _MAP, _NESTED_SCALES, _NESTED_MAP, self._state), "")

    @property
    def needed(self) -> tuple[str, ...]:
        return "", _SCALES, _MAP, self._state

    @property
    def _state(self) -> str:
        return f".quant_state.bitsandbytes__{self.kind}"

    def num_values(self, sizes: Mapping[str, int]) -> int:
        return 2 * sizes[""]

    def shape(self, parts: Mapping[str, StoredTensor]) -> Shape:
        num_bytes = math.prod(check_part(parts, "", [torch.uint8]))
        if math.prod(check_part(parts, self._state, [torch.uint8])) > _MAX_STATE_BYTES:
            raise ValueError(f"{parts[self._state].name} has more than {_MAX_STATE_BYTES} bytes")
        state = _read_state(parts[self._state][...])
        num_values = math.prod(state.shape)
        if -(-num_values // 2) != num_bytes:
            raise ValueError(f"{num_bytes} bytes are not a weight of the shape {list(state.shape)}")
        num_blocks = -(-num_values // state.block)
        check_part(parts, _MAP, [torch.float32], (16,))
        if not state.nested_block:
            check_part(parts, _SCALES, [torch.float32], (num_blocks,))
            return state.shape
        if lacking := {_NESTED_SCALES, _NESTED_MAP} - parts.keys():
            raise ValueError(f"lacks its part {min(lacking)}")
        check_part(parts, _SCALES, [torch.uint8], (num_blocks,))
        check_part(parts, _NESTED_SCALES, [torch.float32], (-(-num_blocks // state.nested_block),))
        check_part(parts, _NESTED_MAP, [torch.float32], (256,))
        return state.shape

    def weight(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        state = _read_state(parts[self._state])
        scales_B, bytes_ = parts[_SCALES], parts[""].flatten()
        if state.nested_block:
            scales_B = _spread(parts[_NESTED_MAP][scales_B.long()], parts[_NESTED_SCALES], state.nested_block)
            scales_B = scales_B + state.nested_offset
        weight_N = torch.empty(math.prod(shape), dtype=dtype)
        num_at_once = _BLOCKS * state.block
        pieces = (
            torch.split(weight_N, num_at_once),
            torch.split(scales_B, _BLOCKS),
            torch.split(bytes_, num_at_once // 2),
        )
        for into, scales, some in zip(*pieces, strict=True):
            codes = torch.stack([some >> 4, some & 15], 1).flatten()[: len(into)]
            into.copy_(_spread(parts[_MAP][codes.long()], scales, state.block))
        return weight_N.view(shape)


def _spread(values_N: Tensor, scales_B: Tensor, block: int) -> Tensor:
    """Return `values_N`, each multiplied by the scale of its block."""
    return values_N * scales_B.repeat_interleave(block)[: len(values_N)]


def _read_state(stored: Tensor) -> _State:
    """Parse the state that bitsandbytes stores with a weight. Raises ValueError."""
    try:
        found = json.loads(bytes(stored.flatten().tolist()))
    except RecursionError as error:
        raise ValueError("its state is nested too deep") from error
    if not isinstance(found, dict) or not isinstance(found.get("shape"), list) or len(found["shape"]) != 2:
        raise ValueError("its state names no matrix")
    is_nested = "nested_blocksize" in found
    return _State(
        shape=tuple(check_int(size, "shape", low=1, high=2**32) for size in found["shape"]),
        block=check_int(found.get("blocksize"), "blocksize", low=2, high=_MAX_BLOCK),
        nested_block=check_int(found["nested_blocksize"], "nested_blocksize", low=1, high=_MAX_BLOCK)
        if is_nested
        else 0,
        nested_offset=check_float(found.get("nested_offset"), "nested_offset", low=-_MAX_OFFSET, high=_MAX_OFFSET)
        if is_nested
        else 0.0,
    )
