"""Writes files completely or not at all: each is written beside its place, and then renamed. `joined` and `split` keep
several items in one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_NUMBER_BYTES = 8


def write_whole(path: Path, pieces: Iterable[bytes | bytearray | memoryview], *, is_flushed: bool = False) -> None:
    """Replace the file at `path` by `pieces`. With `is_flushed`, a loss of power does not undo it. Only one process
    at a time may write a file. Raises OSError, and then leaves the file unchanged, unless only flushing its folder
    failed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(pieces)
            if is_flushed:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if is_flushed:
        flush(path.parent)


def flush(path: Path) -> None:
    """Flush the file or folder at `path` to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def joined(items: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """Yield the bytes of a file with all `items`: each after its length."""
    for each in items:
        yield len(each).to_bytes(_NUMBER_BYTES, "big")
        yield each


def split(data: bytes) -> Iterator[bytes]:
    """Yield the items whose `joined` bytes are `data`."""
    position = 0
    while position < len(data):
        start = position + _NUMBER_BYTES
        position = start + int.from_bytes(data[position:start], "big")
        yield data[start:position]
