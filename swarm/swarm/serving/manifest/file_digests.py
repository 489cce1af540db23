"""Digests of a model's files: sha256, and the hash tree over the chunks of a weight file. Blocking.

Files are read in segments by a few threads, since a model has many gigabytes and hashing takes as long as reading them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from swarm_protocol.errors import IntegrityError
from swarm_protocol.hash_tree import PackedHashTree, leaf_digest
from swarm_protocol.manifest_messages import CHUNK_BYTES

SEGMENT_BYTES = 256 * CHUNK_BYTES
NUM_THREADS = min(4, os.cpu_count() or 1)

OnBytes = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""


def sha256_of(path: Path) -> bytes:
    """Return the sha256 of a small file. Raises IntegrityError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise _unreadable(path, error) from error


def tree_and_sha256(path: Path, on_bytes: OnBytes) -> tuple[PackedHashTree, bytes]:
    """Return the hash tree over the chunks of a file, and the sha256 of the whole. Raises IntegrityError."""
    whole, leaves = hashlib.sha256(), []
    for segment in _segments(path):
        whole.update(segment)
        leaves.append(_leaves(segment))
        on_bytes(len(segment))
    return _tree(path, leaves), whole.digest()


def tree_of(path: Path) -> PackedHashTree:
    """Return the hash tree over the chunks of a file. It is kept while the file stays as it is. Raises
    IntegrityError."""
    try:
        about = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return _tree_at(path, about.st_ino, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=256)
def _tree_at(path: Path, _inode: int, num_bytes: int, _changed_ns: int) -> PackedHashTree:
    """Return the file's hash tree. Blocks for a second for each gigabyte: a server that moves to other blocks of the
    same file need not wait again."""
    starts = range(0, num_bytes, SEGMENT_BYTES)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="swarm-hash") as threads:
        return _tree(path, list(threads.map(lambda start: _leaves(_read(path, start)), starts)))


def read_chunk(path: Path, index: int) -> bytes:
    """Return one chunk of a file. Raises IntegrityError if it cannot be read."""
    return _read(path, index * CHUNK_BYTES, CHUNK_BYTES)


def _segments(path: Path) -> Iterator[bytes]:
    start = 0
    while segment := _read(path, start):
        yield segment
        start += len(segment)


def _read(path: Path, start: int, num_bytes: int = SEGMENT_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)
    except OSError as error:
        raise _unreadable(path, error) from error


def _leaves(segment: bytes) -> bytes:
    view = memoryview(segment)
    return b"".join(leaf_digest(view[at : at + CHUNK_BYTES]) for at in range(0, len(segment), CHUNK_BYTES))


def _tree(path: Path, leaves: list[bytes]) -> PackedHashTree:
    if not any(leaves):
        raise IntegrityError(f"{path} is empty", remedy="download it again")
    return PackedHashTree(b"".join(leaves))


def _unreadable(path: Path, error: OSError) -> IntegrityError:
    return IntegrityError(f"{path} cannot be read: {error.strerror or error}", remedy="download it again")
