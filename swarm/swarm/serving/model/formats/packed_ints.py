"""Groups of small integers with a scale and a zero point each, packed into 32-bit words: AWQ and GPTQ.

A value is scale * (code - zero). Sources: Frantar et al. 2022, arXiv:2210.17323 (GPTQ), as AutoGPTQ and GPTQModel store
it; Lin et al. 2023, arXiv:2306.00978 (AWQ), as AutoAWQ's "gemm" stores it.
Shapes: O outputs, I inputs, G groups of inputs, W codes in a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from swarm_protocol.checks import check_choice, check_int
from torch import Tensor

from swarm.serving.model.formats.format import FLOATS, Shape, check_part
from swarm.serving.model.safetensors_reader import StoredTensor

_WORD_BITS = 32
_MAX_GROUP = 2**20
_INPUTS = 128
"""Inputs computed at once, a multiple of the codes in a word of any format."""

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight outputs, the place of its code in a word."""

_CODES, _ZEROS, _SCALES, _GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInts:
    """A word holds the codes of several inputs (`packs_inputs`) or of several outputs. Words of zeros always are of
    several outputs.

    `places` are the places of the codes in a word. `zero_offset` is added to the stored zeros. A `group_size` of -1
    means one group of all inputs.
    """

    bits: int
    group_size: int
    packs_inputs: bool
    places: tuple[int, ...]
    zero_offset: int
    endings: ClassVar[Mapping[str, str]] = dict.fromkeys((_CODES, _ZEROS, _SCALES, _GROUPS), ".weight")
    needed: ClassVar[tuple[str, ...]] = (_CODES, _ZEROS, _SCALES)

    def num_values(self, sizes: Mapping[str, int]) -> int:
        return sizes[_CODES] * len(self.places)

    def shape(self, parts: Mapping[str, StoredTensor]) -> Shape:
        packed = check_part(parts, _CODES, [torch.int32])
        if len(packed) != 2 or not all(packed):
            raise ValueError(f"{parts[_CODES].name} has the shape {list(packed)}, which is not a matrix")
        num_codes = len(self.places)
        num_in, num_out = (
            (packed[0] * num_codes, packed[1]) if self.packs_inputs else (packed[0], packed[1] * num_codes)
        )
        num_groups = 1 if self.group_size == -1 else -(-num_in // self.group_size)
        check_part(parts, _SCALES, FLOATS, (num_groups, num_out))
        check_part(parts, _ZEROS, [torch.int32], (num_groups, -(-num_out // num_codes)))
        if _GROUPS in parts:
            check_part(parts, _GROUPS, [torch.int32, torch.int64], (num_in,))
        return num_out, num_in

    def weight(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        num_out, num_in = shape
        words, scales_GO = parts[_CODES], parts[_SCALES].float()
        zeros_GO = self._codes(parts[_ZEROS], are_rows=False)[:, :num_out] + self.zero_offset
        zeros_GO &= (1 << self.bits) - 1
        group_I = self._groups(parts, num_in, len(scales_GO))
        weight_OI = torch.empty(shape, dtype=dtype)
        step = _INPUTS // len(self.places) if self.packs_inputs else _INPUTS
        for index in range(-(-num_in // _INPUTS)):
            codes_IO = self._codes(words[index * step : (index + 1) * step], are_rows=self.packs_inputs)
            some = slice(index * _INPUTS, (index + 1) * _INPUTS)
            values_IO = (codes_IO - zeros_GO[group_I[some]]) * scales_GO[group_I[some]]
            weight_OI[:, some] = values_IO.T
        return weight_OI

    def _groups(self, parts: Mapping[str, Tensor], num_in: int, num_groups: int) -> Tensor:
        """Return the group of each input. GPTQ may have quantized the inputs in another order."""
        if _GROUPS not in parts:
            return torch.arange(num_in) // (num_in if self.group_size == -1 else self.group_size)
        group_I = parts[_GROUPS].long()
        if not 0 <= int(group_I.min()) <= int(group_I.max()) < num_groups:
            raise ValueError(f"an input's group index is not below {num_groups}")
        return group_I

    def _codes(self, words: Tensor, *, are_rows: bool) -> Tensor:
        """Unpack the words: the codes of each word become consecutive rows (`are_rows`) or columns."""
        shifts_W = torch.tensor(self.places, dtype=torch.int32) * self.bits
        mask = (1 << self.bits) - 1
        if are_rows:
            return (words[:, None] >> shifts_W[:, None] & mask).flatten(0, 1)
        return (words[:, :, None] >> shifts_W & mask).flatten(1)


def gptq(config: Mapping[str, Any]) -> PackedInts:
    """Raises ValueError for a packing that is not known here."""
    packing = config.get("checkpoint_format", config.get("format", "gptq"))
    check_choice(packing, "checkpoint_format", {"gptq", "gptq_v2"})
    if config.get("pack_dtype", "int32") != "int32":
        raise ValueError("pack_dtype is not int32")
    bits = config.get("bits")
    if type(bits) is not int or bits not in {2, 4, 8}:
        raise ValueError(f"bits is {bits!r:.40}, not 2, 4 or 8")
    return PackedInts(
        bits=bits,
        group_size=_group_size(config),
        packs_inputs=True,
        places=tuple(range(_WORD_BITS // bits)),
        zero_offset=1 if packing == "gptq" else 0,
    )


def awq(config: Mapping[str, Any]) -> PackedInts:
    """Raises ValueError for a packing that is not known here."""
    check_choice(config.get("format", config.get("version", "gemm")), "version", {"gemm"})
    if config.get("bits", 4) != 4 or config.get("zero_point", True) is not True:
        raise ValueError("bits is not 4, or zero_point is not true")
    return PackedInts(bits=4, group_size=_group_size(config), packs_inputs=False, places=_AWQ_PLACES, zero_offset=0)


def _group_size(config: Mapping[str, Any]) -> int:
    size = config.get("group_size", 128)
    if size == -1 and type(size) is int:
        return -1
    return check_int(size, "group_size", low=1, high=_MAX_GROUP)
