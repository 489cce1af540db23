"""Check a model's files against its manifest, by name. Blocking."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm_protocol.errors import IntegrityError
from swarm_protocol.hash_tree import PackedHashTree
from swarm_protocol.manifest_messages import ModelManifest, PublishedManifest, WeightFile

from swarm.serving.manifest.file_digests import OnBytes, sha256_of, tree_and_sha256, tree_of
from swarm.serving.model.manifest_file import MANIFEST_FILE
from swarm.serving.model.shape import INDEX, SMALL_FILES

_REMEDY = f"get the model's files again; or remove {MANIFEST_FILE} to serve them as an unpublished model"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFile:
    """A weight file on this machine that is the one in the manifest."""

    path: Path
    tree: PackedHashTree


def complaint_about(manifest: ModelManifest, files: Mapping[str, bytes]) -> str:
    """Say which of a model's small files, as a server gave them, are not those of the manifest; "" if all are."""
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
    """Check config, tokenizer, chat template and index. Raises IntegrityError for one that differs or is not listed."""
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
    """Check every file of a whole model, weights by both their digests. Raises IntegrityError for the first that
    differs."""
    check_small_files(directory, published)
    for each in published.manifest.weights:
        path = directory / each.name
        if not path.is_file():
            raise _differs(published, path, "is missing, but is listed in")
        tree, sha256 = tree_and_sha256(path, on_bytes)
        if path.stat().st_size != each.num_bytes or (tree.root, sha256) != (each.root, each.sha256):
            raise _differs(published, path, "is not the file in")


def _checked_tree(directory: Path, published: PublishedManifest, each: WeightFile) -> PackedHashTree:
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
