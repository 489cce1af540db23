"""The interface of a quantized checkpoint's format, and a quantized weight, which is dequantized when it is read.

A format is a value made from the config. It recognizes the parts of a weight by the endings of their names, checks them
against the file's header, and computes the weight from their values. `weights` reads the weights of one span one by
one, so that memory never holds the whole checkpoint, or a block twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import torch
from swarm_protocol.errors import IntegrityError
from torch import Tensor

from swarm.serving.model.safetensors_reader import StoredTensor

Shape = tuple[int, ...]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CheckpointFormat(Protocol):
    """A format. `endings` maps the ending of a part's name to the ending of its weight's name. The part with the
    weight's own name has the ending "". `needed` are the endings of the required parts.

    The methods get the parts of one weight by their endings, including all `needed` ones.
    """

    @property
    def endings(self) -> Mapping[str, str]: ...

    @property
    def needed(self) -> Collection[str]: ...

    def num_values(self, sizes: Mapping[str, int]) -> int:
        """Return the weight's number of values, from that of each part."""

    def shape(self, parts: Mapping[str, StoredTensor]) -> Shape:
        """Return the weight's shape. Raises ValueError for parts that do not fit together."""

    def weight(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return the weight, computed in float32 and rounded once. Raises ValueError for invalid values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A quantized weight. `tensor[...]` reads its parts, and dequantizes them to `dtype`; see StoredTensor."""

    name: str
    format: CheckpointFormat
    parts: Mapping[str, StoredTensor]
    shape: Shape
    dtype: torch.dtype

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        """Return the weight. Raises IntegrityError for a file that has become shorter, or for invalid values."""
        values = {ending: part[...] for ending, part in self.parts.items()}
        try:
            return self.format.weight(values, self.shape, self.dtype)
        except ValueError as error:
            raise _damaged(self.name, error) from error


def group(names: Iterable[str], format_: CheckpointFormat | None) -> dict[str, dict[str, str]]:
    """Return the parts of each weight: ending -> name in the checkpoint. A plain weight is its own part, ""."""
    groups: dict[str, dict[str, str]] = {}
    endings = format_.endings if format_ else {}
    for name in names:
        ending = next((ending for ending in endings if name.endswith(ending)), "")
        whole = name.removesuffix(ending) + endings[ending] if ending else name
        groups.setdefault(whole, {})[ending] = name
    return groups


def num_values(name: str, parts: Mapping[str, int], format_: CheckpointFormat | None) -> int:
    """Return the weight's number of values, from that of its parts. Raises IntegrityError if a part is missing."""
    if format_ is None or parts.keys() == {""}:
        return parts[""]
    try:
        _check_needed(parts, format_)
    except ValueError as error:
        raise _damaged(name, error) from error
    return format_.num_values(parts)


def quantized_tensor(
    name: str, parts: Mapping[str, StoredTensor], format_: CheckpointFormat, dtype: torch.dtype
) -> QuantizedTensor:
    """Return the weight `name`, after a check of its parts' shapes and dtypes. Raises IntegrityError, which names the
    weight."""
    try:
        _check_needed(parts, format_)
        shape = format_.shape(parts)
    except ValueError as error:
        raise _damaged(name, error) from error
    return QuantizedTensor(name=name, format=format_, parts=parts, shape=shape, dtype=dtype)


def check_part(
    parts: Mapping[str, StoredTensor], ending: str, dtypes: Collection[torch.dtype], shape: Shape | None = None
) -> Shape:
    """Return the part's shape. Raises ValueError if its dtype is not one of `dtypes`, or its shape is not `shape`."""
    part = parts[ending]
    if part.dtype not in dtypes:
        raise ValueError(f"{part.name} holds {part.dtype}, not {' or '.join(map(str, dtypes))}")
    if shape is not None and part.shape != shape:
        raise ValueError(f"{part.name} has the shape {list(part.shape)}, not {list(shape)}")
    return part.shape


def _check_needed(parts: Collection[str], format_: CheckpointFormat) -> None:
    if missing := sorted(set(format_.needed) - set(parts)):
        raise ValueError(f"lacks its part {missing[0] or 'weight'}")


def _damaged(name: str, error: ValueError) -> IntegrityError:
    return IntegrityError(f"the quantized weight {name} cannot be read: {error}", remedy="download the model again")
