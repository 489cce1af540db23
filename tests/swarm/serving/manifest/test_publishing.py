"""Manifests of real checkpoints: what they cover, that equal files give equal manifests, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.published_models import PUBLISHER, STRANGER, published_copy
from support.tiny_models import FAMILIES, NUM_BLOCKS
from swarm.serving.manifest.publishing import merged, publish
from swarm.serving.model.model_files import manifest_beside, open_model
from swarm.serving.model.safetensors_reader import stored_tensors
from swarm.serving.model.shape import MANIFEST_FILE
from swarm.serving.model.weights import needed_tensors
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation
from swarm_protocol.manifest_messages import (
    ByteRange,
    ModelManifest,
    SignedManifest,
    manifest_revision,
    open_manifest,
    sign_manifest,
)


def sign(directory: Path, name: str = "tiny") -> ModelManifest:
    return publish(directory, name, PUBLISHER, published_at=1, origin="", on_bytes=lambda _num: None).manifest


@pytest.mark.parametrize("family", FAMILIES)
def test_ranges_of_a_span_are_the_bytes_of_the_tensors_that_its_server_reads(
    family: str, model_dirs: Callable[[str], Path]
) -> None:
    files = open_model(model_dirs(family))
    manifest = sign(files.directory)
    assert manifest.num_blocks == NUM_BLOCKS
    spans = (0, 1), (2, 4), (NUM_BLOCKS - 1, NUM_BLOCKS), (0, NUM_BLOCKS)
    for (start, end), needed in zip(spans, needed_tensors(files, spans), strict=True):
        expected: dict[str, set[int]] = {}
        for name in needed:
            path = files.shards[name]
            tensor = stored_tensors(path)[name]
            num_bytes = tensor.num_values * tensor.dtype.itemsize
            expected.setdefault(path.name, set()).update(range(tensor.offset, tensor.offset + num_bytes))
        found: dict[str, set[int]] = {}
        for each in manifest.ranges_of(start, end):
            of_file = found.setdefault(manifest.weights[each.file].name, set())
            of_file.update(range(each.start, each.start + each.num_bytes))
        assert found == expected


def test_manifest_names_every_file_by_its_sha256(llama_dir: Path) -> None:
    manifest = sign(llama_dir)
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {each.name for each in manifest.files}
    assert "model.safetensors.index.json" in manifest.file_names
    for each in (*manifest.files, *manifest.weights):
        assert hashlib.sha256((llama_dir / each.name).read_bytes()).digest() == each.sha256


def test_manifests_are_equal_only_when_files_name_and_publisher_are_equal(llama_dir: Path, tmp_path: Path) -> None:
    one, same = (published_copy(llama_dir, tmp_path / place) for place in ("one", "same"))
    assert one.signed == same.signed
    renamed = published_copy(llama_dir, tmp_path / "renamed", name="other")
    strange = published_copy(llama_dir, tmp_path / "strange", publisher=STRANGER)
    assert len({one.digest, renamed.digest, strange.digest}) == 3
    revisions = {each.revision(dtype) for each in (one, renamed, strange) for dtype in ("float32", "int4")}
    assert len(revisions) == 6
    assert open_model(tmp_path / "one").revision("int4") == manifest_revision(one.digest, "int4")


def test_manifest_that_was_changed_or_signed_by_another_is_refused(llama_dir: Path, tmp_path: Path) -> None:
    published = published_copy(llama_dir, tmp_path / "tiny")
    signed = SignedManifest.from_bytes(published.signed)
    forged = replace(published.manifest, name="other").to_bytes()
    with pytest.raises(IntegrityError):
        open_manifest(replace(signed, manifest=forged).to_bytes())
    with pytest.raises(PeerViolation):
        open_manifest(published.signed[:-70])
    path = tmp_path / "tiny" / MANIFEST_FILE
    path.write_bytes(replace(signed, manifest=forged).to_bytes())
    with pytest.raises(IntegrityError, match=f"the manifest {path} is damaged"):
        open_model(tmp_path / "tiny")
    path.write_bytes(b"no manifest")
    with pytest.raises(IntegrityError, match="is not a signed manifest"):
        manifest_beside(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weights": ()}, "no weights"),
        ({"blocks": ()}, "no blocks"),
        ({"before": (ByteRange(file=99, start=0, num_bytes=1),)}, "in none of its files"),
        ({"after": (ByteRange(file=0, start=2**40, num_bytes=1),)}, "in none of its files"),
        ({"name": "../etc"}, "not a name"),
    ],
)
def test_manifest_with_invalid_values_is_refused(llama_dir: Path, change: dict[str, Any], why: str) -> None:
    manifest = sign(llama_dir)
    with pytest.raises(ValueError, match=why):
        replace(manifest, **change)


@pytest.mark.parametrize("name", ["sub/model.safetensors", "../model.safetensors", ".hidden", "/etc/passwd", ""])
def test_manifest_that_names_a_file_outside_its_directory_is_refused(llama_dir: Path, name: str) -> None:
    manifest = sign(llama_dir)
    with pytest.raises(ValueError, match="name"):
        replace(manifest.weights[0], name=name)


def test_manifest_that_names_a_file_twice_or_has_too_many_ranges_is_refused(llama_dir: Path) -> None:
    manifest = sign(llama_dir)
    with pytest.raises(ValueError, match="a file twice"):
        replace(manifest, files=(*manifest.files, manifest.files[0]))
    many = tuple(ByteRange(file=0, start=at, num_bytes=1) for at in range(12_280))
    with pytest.raises(ValueError, match="more than 12288"):
        replace(manifest, before=many)


def test_largest_manifest_can_be_signed_and_read(llama_dir: Path) -> None:
    """Its encoding is within MAX_MANIFEST_BYTES and MAX_MESSAGE_VALUES."""
    manifest = sign(llama_dir)
    file = replace(manifest.weights[0], num_bytes=2**46)
    weights = tuple(replace(file, name=f"model-{i:0110d}.safetensors") for i in range(1024))
    ranges = tuple(ByteRange(file=1023, start=2**45 + i, num_bytes=2**40) for i in range(3))
    blocks = (replace(manifest.blocks[0], ranges=ranges),) * 4095
    largest = replace(manifest, weights=weights, blocks=blocks, before=ranges, after=())
    assert sign_manifest(largest, PUBLISHER).manifest == largest


def test_invalid_model_name_is_refused(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no model can be published as 'my model'"):
        sign(llama_dir, "my model")


def test_adjacent_ranges_are_merged() -> None:
    ranges = [(0, 10, 5), (0, 0, 10), (0, 20, 5), (1, 25, 5), (0, 22, 8), (0, 0, 10)]
    found = merged(ByteRange(file=file, start=start, num_bytes=num) for file, start, num in ranges)
    assert [(each.file, each.start, each.num_bytes) for each in found] == [(0, 0, 15), (0, 20, 10), (1, 25, 5)]
