"""Tensors in safetensors files, each read when it is asked for, into memory of its own.

Not mapped: a mapped file stays in memory beside the copies that are made of it, and what needs no copy keeps it there
for good. A node that was told how much memory to take could not keep to that.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import torch
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor

from swarm.serving.model.header import read_header

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """`tensor[...]` reads it, as from the slices of the safetensors library. `offset` is from the file's beginning."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        """Raises IntegrityError if the file has become shorter, or is gone."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        if not num_bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        # pages of its own, which go back to the system with the tensor: a heap would keep them
        memory = mmap.mmap(-1, num_bytes)
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                num_read = file.readinto(memory)
        except OSError as error:
            raise IntegrityError(f"{self.path} cannot be read: {error}", remedy="download it again") from error
        if num_read != num_bytes:
            raise IntegrityError(f"{self.path} ends within {self.name}", remedy="download it again")
        return torch.frombuffer(memory, dtype=self.dtype).reshape(self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file, by name; nothing but its header is read.

    Raises IntegrityError for a truncated file or none of this kind, ConfigError for numbers of a kind not known here.
    """
    header = read_header(path)
    if unknown := {entry.kind for entry in header.values()} - _DTYPES.keys():
        raise ConfigError(f"{path} holds numbers of kind {min(unknown)}", remedy="serve a checkpoint in bf16 or fp32")
    return {
        name: StoredTensor(path=path, name=name, dtype=_DTYPES[entry.kind], shape=entry.shape, offset=entry.offset)
        for name, entry in header.items()
    }
