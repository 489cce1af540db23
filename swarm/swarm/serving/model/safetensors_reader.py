"""Reads safetensors files: the header, and each tensor on demand, into its own memory.

Files are not memory-mapped. Pages of a mapped file stay in memory in addition to copies of them, and a tensor without a
copy keeps its file mapped, so a node could not keep its memory limit. Blocks.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import torch
from safetensors import SafetensorError, safe_open
from swarm_protocol.errors import ConfigError, IntegrityError, one_line, reason_of
from torch import Tensor

MAX_HEADER_BYTES = 32 << 20
"""Maximum size of a header: some 200,000 tensors with long names. The library takes 100 MB for it, and Python's objects
several times as much."""

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
    """A tensor in a file. `tensor[...]` reads it, as a slice of the safetensors library does. `offset` is in bytes from
    the file's beginning.

    `kind` is the file's name of the dtype, such as "BF16".
    """

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.kind]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        """Read the tensor. Raises IntegrityError if the file has become shorter or is missing."""
        num_bytes = self.num_values * self.dtype.itemsize
        if not num_bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        # anonymous pages, which the system gets back with the tensor; a heap would keep them
        memory = mmap.mmap(-1, num_bytes)
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                num_read = file.readinto(memory)
        except OSError as error:
            raise IntegrityError(
                f"{self.path} cannot be read: {reason_of(error)}", remedy="download it again"
            ) from error
        if num_read != num_bytes:
            raise IntegrityError(f"{self.path} ends within {self.name}", remedy="download it again")
        return torch.frombuffer(memory, dtype=self.dtype).reshape(self.shape)


def _checked_size(header_bytes: int) -> int:
    """Return `header_bytes`. Raises ValueError if it is too large."""
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {header_bytes:,} bytes, more than {MAX_HEADER_BYTES:,}")
    return header_bytes


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a file, by name, of any dtype. Raises IntegrityError for a file that is truncated or not a
    safetensors file."""
    try:
        with path.open("rb") as file:
            header_bytes = _checked_size(int.from_bytes(file.read(8), "little"))
            with safe_open(path, framework="pt"):  # the library checks sizes and offsets
                header = json.loads(file.read(header_bytes))
    except (SafetensorError, OSError, ValueError) as error:
        raise IntegrityError(f"{path} is damaged: {one_line(error)}", remedy="download it again") from error
    header.pop("__metadata__", None)
    begin = 8 + header_bytes
    return {
        name: StoredTensor(
            path=path,
            name=name,
            kind=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=begin + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a file, by name. Reads only the header.

    Raises as `read_header`, and ConfigError for a dtype that is not supported.
    """
    header = read_header(path)
    if unknown := {entry.kind for entry in header.values()} - _DTYPES.keys():
        raise ConfigError(
            f"{path} holds numbers of type {min(unknown)}, which is not supported",
            remedy="serve a checkpoint in bf16 or fp32",
        )
    return header
