"""A published model's files are checked by name before they are served, all of them or those that a span needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.published_models import flip_a_byte, published_copy
from support.tiny_models import NUM_BLOCKS
from swarm.serving.manifest.verification import check_directory, complaint_about, tree_and_sha256, tree_of
from swarm.serving.model.model_files import open_model
from swarm.serving.server.deployment import ServerOptions, load
from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.manifest_messages import PublishedManifest


@pytest.fixture
def place(llama_dir: Path, tmp_path: Path) -> Path:
    published_copy(llama_dir, tmp_path / "tiny")
    return tmp_path / "tiny"


def published_in(place: Path) -> PublishedManifest:
    published = open_model(place).manifest
    assert published is not None
    return published


def check(place: Path) -> None:
    check_directory(place, published_in(place), lambda _num: None)


def test_unchanged_published_directory_is_whole_and_is_served_from_its_files(place: Path) -> None:
    check(place)
    loaded = load(place, 0, 2, ServerOptions())
    manifest = published_in(place).manifest
    assert loaded.manifest == published_in(place)
    assert loaded.revision == published_in(place).revision("float32")
    touched = {each.file for each in manifest.ranges_of(0, 2)}
    assert loaded.held.keys() == touched != set(range(len(manifest.weights)))
    assert all(held.tree.root == manifest.weights[index].root for index, held in loaded.held.items())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_small_file_that_differs_is_refused_by_name(place: Path, name: str) -> None:
    (place / name).write_bytes((place / name).read_bytes() + b"\n")
    for refuse in (lambda: check(place), lambda: load(place, 0, 2, ServerOptions())):
        with pytest.raises(IntegrityError, match=f"{name} is not the file in the manifest of tiny that 12D3KooW"):
            refuse()


def test_file_that_was_added_or_is_missing_is_refused_by_name(place: Path) -> None:
    (place / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(IntegrityError, match=r"chat_template.jinja is not listed in the manifest of tiny"):
        load(place, 0, 2, ServerOptions())
    (place / "chat_template.jinja").unlink()
    (place / "tokenizer_config.json").unlink()
    with pytest.raises(IntegrityError, match=r"tokenizer_config.json is missing, but is listed in the manifest of"):
        check(place)


def test_one_flipped_bit_of_the_weights_is_refused_by_the_file_s_name(place: Path) -> None:
    manifest = published_in(place).manifest
    of_others = {each.file for each in manifest.ranges_of(0, 2)}
    block = max({each.file for each in manifest.ranges_of(3, 4)} - of_others)
    name = manifest.weights[block].name
    flip_a_byte(place / name)
    for refuse in (lambda: check(place), lambda: load(place, 3, 4, ServerOptions())):
        with pytest.raises(IntegrityError, match=f"{name} is not the file in the manifest"):
            refuse()
    assert load(place, 0, 2, ServerOptions()).held, "the files of other blocks are intact"
    published = published_in(place)
    (place / name).unlink()
    with pytest.raises(IntegrityError, match=f"{name} is missing"):
        check_directory(place, published, lambda _num: None)


def test_published_model_refuses_a_span_beyond_it(place: Path) -> None:
    with pytest.raises(ConfigError, match="are not within this model"):
        load(place, 0, NUM_BLOCKS + 1, ServerOptions())


def test_small_files_from_a_server_are_compared_with_the_manifest(place: Path) -> None:
    manifest, files = published_in(place).manifest, open_model(place).small_files()
    assert complaint_about(manifest, files) == ""
    assert complaint_about(manifest, files | {"tokenizer.json": b"{}"}) == (
        "its tokenizer.json is not the one in the manifest"
    )
    assert complaint_about(manifest, files | {"chat_template.json": b"{}"}) == (
        "its chat_template.json is not in the manifest"
    )
    assert complaint_about(manifest, {name: files[name] for name in files if name != "config.json"}) == (
        "its config.json is missing"
    )


def test_trees_of_a_file_in_segments_are_those_of_a_single_pass(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 2**17)  # two segments
    tree, _ = tree_and_sha256(path, lambda _num: None)
    assert (tree_of(path).root, tree_of(path).num_leaves) == (tree.root, 512)
    path.write_bytes(b"")
    with pytest.raises(IntegrityError, match="is empty"):
        tree_of(path)
    path.unlink()
    with pytest.raises(IntegrityError, match="cannot be read"):
        tree_of(path)
