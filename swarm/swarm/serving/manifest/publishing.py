"""Makes and signs the manifest of a model's directory: digests of its files, and the byte ranges of its blocks'
tensors.

Blocks: every byte of the model is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from swarm_protocol import limits
from swarm_protocol.checks import check_name
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import (
    BlockBytes,
    ByteRange,
    ManifestFile,
    ModelManifest,
    PublishedManifest,
    WeightFile,
    sign_manifest,
)

from swarm.serving.manifest.verification import OnBytes, sha256_of, tree_and_sha256
from swarm.serving.model.model_files import ModelFiles, open_model
from swarm.serving.model.safetensors_reader import stored_tensors
from swarm.serving.model.shape import INDEX, SMALL_FILES
from swarm.serving.model.weights import block_of_tensors, needed_tensors


def publish(
    directory: Path,
    name: str,
    identity: Identity,
    *,
    published_at: int,
    origin: str,
    on_bytes: OnBytes,
    earlier: PublishedManifest | None = None,
) -> PublishedManifest:
    """Sign the manifest of the model in `directory`, under `name`, as `identity`.

    `origin` says where the model comes from. `on_bytes` is called while the weights are read. Returns `earlier` if only
    the time differs: a new digest is a new revision, and servers of different revisions never work together. Raises
    ConfigError for a model that cannot be served or an invalid name, IntegrityError for damaged files.
    """
    try:
        check_name(name, "name")
    except ValueError as error:
        raise ConfigError(f"no model can be published as {name!r:.80}", remedy="choose another name") from error
    files = open_model(directory)
    small = [directory / file_name for file_name in (*SMALL_FILES, INDEX) if (directory / file_name).is_file()]
    shards = sorted(set(files.shards.values()))
    before, blocks, after = _block_ranges(files, shards)
    try:
        manifest = ModelManifest(
            name=name,
            publisher=identity.peer_id,
            published_at=published_at,
            files=tuple(
                ManifestFile(name=path.name, num_bytes=path.stat().st_size, sha256=sha256_of(path)) for path in small
            ),
            weights=tuple(_weight_file(path, on_bytes) for path in shards),
            before=before,
            blocks=tuple(BlockBytes(ranges=ranges) for ranges in blocks),
            after=after,
            origin=origin,
        )
        if earlier is not None and replace(manifest, published_at=earlier.manifest.published_at) == earlier.manifest:
            return earlier
        return sign_manifest(manifest, identity)
    except ValueError as error:
        raise ConfigError(
            f"{directory} cannot be published as {name!r:.80}: {error}",
            remedy="write the model again with save_pretrained",
        ) from error


def _weight_file(path: Path, on_bytes: OnBytes) -> WeightFile:
    tree, sha256 = tree_and_sha256(path, on_bytes)
    return WeightFile(name=path.name, num_bytes=path.stat().st_size, sha256=sha256, root=tree.root)


def _block_ranges(
    files: ModelFiles, shards: Sequence[Path]
) -> tuple[tuple[ByteRange, ...], list[tuple[ByteRange, ...]], tuple[ByteRange, ...]]:
    """Return the byte ranges before the first block, of each block, and after the last one."""
    stored = {name: (at, tensor) for at, path in enumerate(shards) for name, tensor in stored_tensors(path).items()}

    def ranges(weights: Iterable[str]) -> tuple[ByteRange, ...]:
        found = (stored[part] for weight in weights for part in files.parts[weight].values() if part in stored)
        return merged(
            ByteRange(file=at, start=each.offset, num_bytes=each.num_values * each.dtype.itemsize)
            for at, each in found
            if each.num_values
        )

    block_of = block_of_tensors(files)
    outside = {weight for weight, block in block_of.items() if block is None}
    first_and_last = (0, 1), (files.num_blocks - 1, files.num_blocks)
    before, after = (ranges(needed & outside) for needed in needed_tensors(files, first_and_last))
    blocks = [ranges(weight for weight, block in block_of.items() if block == each) for each in range(files.num_blocks)]
    num_ranges = len(before) + len(after) + sum(map(len, blocks))
    if num_ranges > limits.MAX_MANIFEST_RANGES:
        raise ConfigError(
            f"the tensors of {files.directory} lie in {num_ranges} pieces, more than {limits.MAX_MANIFEST_RANGES}",
            remedy="write the model again with save_pretrained, which keeps a block's tensors together",
        )
    return before, blocks, after


def merged(ranges: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """Return the ranges in order, with adjacent and overlapping ones merged."""
    found: list[ByteRange] = []
    for each in sorted(set(ranges), key=lambda each: (each.file, each.start)):
        last = found[-1] if found else None
        if last is not None and last.file == each.file and last.start + last.num_bytes >= each.start:
            end = max(last.start + last.num_bytes, each.start + each.num_bytes)
            found[-1] = ByteRange(file=each.file, start=last.start, num_bytes=end - last.start)
        else:
            found.append(each)
    return tuple(found)
