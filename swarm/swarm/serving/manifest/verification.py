"""Checks a model's files against its manifest: by sha256, and by the hash tree over a weight file's chunks. Blocks.

A few threads read a file in segments, since a model has many gigabytes, and hashing takes as long as reading.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from swarm_protocol.errors import IntegrityError
from swarm_protocol.hash_tree import HashTree, leaf_digest
from swarm_protocol.manifest_messages import CHUNK_BYTES, ModelManifest, PublishedManifest, WeightFile

from swarm.serving.model.shape import INDEX, MANIFEST_FILE, SMALL_FILES

SEGMENT_BYTES = 256 * CHUNK_BYTES
NUM_THREADS = min(4, os.cpu_count() or 1)
OnBytes = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


def sha256_of(path: Path) -> bytes:
    """Return the sha256 of a small file. Raises IntegrityError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise _unreadable(path, error) from error


def tree_and_sha256(path: Path, on_bytes: OnBytes) -> tuple[HashTree, bytes]:
    """Return the hash tree over the chunks of a file, and the sha256 of the file. Raises IntegrityError."""
    whole, leaves = hashlib.sha256(), list[bytes]()
    for segment in _segments(path):
        whole.update(segment)
        leaves += _leaves(segment)
        on_bytes(len(segment))
    return _tree(path, leaves), whole.digest()


def tree_of(path: Path) -> HashTree:
    """Return the hash tree over the chunks of a file, cached until the file changes. Raises IntegrityError."""
    try:
        about = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return _tree_at(path, about.st_ino, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=256)
def _tree_at(path: Path, _inode: int, num_bytes: int, _changed_ns: int) -> HashTree:
    """Return the file's hash tree. Blocks for a second per gigabyte; the cache spares a server that moves to other
    blocks of the same file."""
    starts = range(0, num_bytes, SEGMENT_BYTES)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="swarm-hash") as threads:
        segments = threads.map(lambda start: _leaves(_read(path, start)), starts)
        return _tree(path, list(chain.from_iterable(segments)))


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


def _leaves(segment: bytes) -> list[bytes]:
    view = memoryview(segment)
    return [leaf_digest(view[at : at + CHUNK_BYTES]) for at in range(0, len(segment), CHUNK_BYTES)]


def _tree(path: Path, leaves: list[bytes]) -> HashTree:
    if not leaves:
        raise IntegrityError(f"{path} is empty", remedy="download it again")
    return HashTree.of(leaves)


def _unreadable(path: Path, error: OSError) -> IntegrityError:
    return IntegrityError(f"{path} cannot be read: {error.strerror or error}", remedy="download it again")


_REMEDY = f"get the model's files again; or remove {MANIFEST_FILE} to serve them as an unpublished model"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFile:
    """A weight file on this machine that matches the manifest."""

    path: Path
    tree: HashTree


def complaint_about(manifest: ModelManifest, files: Mapping[str, bytes]) -> str:
    """Return in words how a model's small files from a server differ from the manifest; "" if they do not."""
    listed = {each.name: each for each in manifest.files if each.name in SMALL_FILES}
    for name in listed.keys() - files.keys():
        return f"its {name} is missing"
    for name, payload in files.items():
        if name not in listed:
            return f"its {name} is not in the manifest"
        if hashlib.sha256(payload).digest() != listed[name].sha256:
            return f"its {name} is not the one in the manifest"
    return ""


def check_small_files(directory: Path, published: PublishedManifest) -> None:
    """Check config, tokenizer, chat template and index. Raises IntegrityError for a file that differs, is missing or is
    not listed."""
    listed = {each.name: each for each in published.manifest.files}
    for name in sorted(listed.keys() | {*SMALL_FILES, INDEX}):
        path = directory / name
        if name not in listed and path.is_file():
            raise _differs(published, path, "is not listed in")
        if name in listed and (
            not path.is_file()
            or path.stat().st_size != listed[name].num_bytes
            or sha256_of(path) != listed[name].sha256
        ):
            raise _differs(published, path, "is not the file in" if path.is_file() else "is missing, but is listed in")


def held_files(directory: Path, published: PublishedManifest, names: Collection[str]) -> dict[int, HeldFile]:
    """Check weight files; return those in `names` by their index in the manifest. Raises IntegrityError."""
    held = {
        index: HeldFile(path=directory / each.name, tree=_checked_tree(directory, published, each))
        for index, each in enumerate(published.manifest.weights)
        if each.name in names
    }
    for name in sorted(set(names) - {each.path.name for each in held.values()}):
        raise _differs(published, directory / name, "is not listed in")
    return held


def check_directory(directory: Path, published: PublishedManifest, on_bytes: OnBytes) -> None:
    """Check every file of a complete model, weights by both digests. Raises IntegrityError for the first that
    differs."""
    check_small_files(directory, published)
    for each in published.manifest.weights:
        path = directory / each.name
        if not path.is_file():
            raise _differs(published, path, "is missing, but is listed in")
        tree, sha256 = tree_and_sha256(path, on_bytes)
        if path.stat().st_size != each.num_bytes or (tree.root, sha256) != (each.root, each.sha256):
            raise _differs(published, path, "is not the file in")


def _checked_tree(directory: Path, published: PublishedManifest, each: WeightFile) -> HashTree:
    path = directory / each.name
    if not path.is_file() or path.stat().st_size != each.num_bytes:
        raise _differs(published, path, "is not the file in")
    tree = tree_of(path)
    if tree.root != each.root:
        raise _differs(published, path, "is not the file in")
    return tree


def _differs(published: PublishedManifest, path: Path, how: str) -> IntegrityError:
    return IntegrityError(
        f"{path} {how} the manifest of {published.manifest.name} that {published.publisher} signed", remedy=_REMEDY
    )
