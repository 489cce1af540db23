"""Writes safetensors files piece by piece: what is written is nowhere a second time in memory.

The library's own `save_file` makes bytes of every tensor first. The format: 8 bytes with the length of the header, the
header in JSON, then the tensors' bytes one after the other (https://github.com/huggingface/safetensors). Blocks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

PIECE_BYTES = 1 << 20

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """What stands before the bytes of these tensors, in their order."""
    entries, start = dict[str, object](), 0
    for name, x in tensors.items():
        stop = start + x.numel() * x.element_size()
        entries[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers expect the tensors at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of CPU tensors, in turn."""
    for x in tensors.values():
        view = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def write_file(path: Path, *parts: Iterator[bytes | memoryview]) -> None:
    """Write all of `parts`, on the disk when this returns. Raises OSError."""
    with path.open("xb") as file:
        for part in parts:
            for piece in part:
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
