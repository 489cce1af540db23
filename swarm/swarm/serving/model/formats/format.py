"""The interface of a quantized checkpoint's format, and a weight of one, which is dequantized when it is read.

A format is a value made from the config. It names the parts of a weight by the endings of their names, checks them
against the file's header, and computes the weight from their values. `weights` reads the weights of one span, one by
one, so that neither the whole checkpoint nor a block twice is ever in memory.
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
    """`endings` maps how the name of a part ends to how the name of its weight ends instead. The part that has the
    weight's own name is the one with the ending "". `needed` are the parts without which there is no weight.

    The methods are called with the parts of one weight, by their endings, `needed` ones among them.
    """

    @property
    def endings(self) -> Mapping[str, str]: ...

    @property
    def needed(self) -> Collection[str]: ...

    def num_values(self, sizes: Mapping[str, int]) -> int:
        """Return the number of the weight's values, from the number of values in each part."""

    def shape(self, parts: Mapping[str, StoredTensor]) -> Shape:
        """Return the weight's shape. Raises ValueError for parts that do not belong together."""

    def weight(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return the weight, computed in float32 and rounded once. Raises ValueError for values that have no
        meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """`tensor[...]` reads its parts and dequantizes them, as StoredTensor reads one. `dtype` is what is made of it."""

    name: str
    format: CheckpointFormat
    parts: Mapping[str, StoredTensor]
    shape: Shape
    dtype: torch.dtype

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        """Raises IntegrityError for a file that became shorter, or values that have no meaning."""
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
    """Return the number of the weight's values, from that of its parts. Raises IntegrityError if a part is missing."""
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
    """Checks the parts' shapes and kinds. Raises IntegrityError, naming the weight."""
    try:
        _check_needed(parts, format_)
        shape = format_.shape(parts)
    except ValueError as error:
        raise _damaged(name, error) from error
    return QuantizedTensor(name=name, format=format_, parts=parts, shape=shape, dtype=dtype)


def check_part(
    parts: Mapping[str, StoredTensor], ending: str, dtypes: Collection[torch.dtype], shape: Shape | None = None
) -> Shape:
    """Return the part's shape. Raises ValueError if its values are of none of `dtypes`, or it has another shape."""
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
