from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from swarm.serving.model.model_files import open_model, weight_sizes
from swarm.serving.model.shape import SMALL_FILES
from swarm.serving.model.weights import block_of_tensors, linear_tensors, needed_shards
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, IntegrityError
from transformers import LlamaForCausalLM


@pytest.fixture
def copied(llama_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(llama_dir, tmp_path / "model")
    return tmp_path / "model"


def test_open_reads_the_shape(llama_dir: Path) -> None:
    files = open_model(llama_dir)
    assert (files.num_blocks, files.hidden_size, files.vocab_size) == (6, 32, 256)
    assert len(set(files.shards.values())) > 1
    assert weight_sizes(files)["model.embed_tokens.weight"] == 256 * 32


def test_whole_model_is_built_once_however_often_it_is_inspected(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    build = LlamaForCausalLM.__init__
    monkeypatch.setattr(LlamaForCausalLM, "__init__", lambda *args: (built.append(args), build(*args))[1])
    files = open_model(llama_dir)
    assert len(block_of_tensors(files)) > len(linear_tensors(files, "int8")) > 0
    assert len(needed_shards(files, 2, 3)) < len(needed_shards(files, 0, 6)) == len(set(files.shards.values()))
    assert len(built) == 1


def test_revision_of_a_copy_is_the_same(llama_dir: Path, copied: Path) -> None:
    assert open_model(llama_dir).revision() == open_model(copied).revision()


def test_revision_differs_by_dtype(llama_dir: Path) -> None:
    files = open_model(llama_dir)
    assert len({files.revision(dtype) for dtype in ("float32", "bfloat16", "float16", "int8", "int4")}) == 5


def test_revision_of_other_weights_differs(copied: Path) -> None:
    before = open_model(copied).revision()
    shard = max(copied.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    assert open_model(copied).revision() != before


def test_revision_with_other_default_options_differs(copied: Path) -> None:
    revisions = {open_model(copied).revision()}
    for temperature in (0.5, 0.6):
        (copied / "generation_config.json").write_text(f'{{"do_sample": true, "temperature": {temperature}}}')
        revisions.add(open_model(copied).revision())
    assert len(revisions) == 3


def test_small_files_include_only_known_names(copied: Path) -> None:
    (copied / "secret.txt").write_text("no")
    (copied / "modeling_evil.py").write_text("no")
    names = set(open_model(copied).small_files())
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names <= set(SMALL_FILES)


def test_small_files_too_large_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MODEL_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="larger than 10 bytes"):
        open_model(copied).small_files()


@pytest.mark.parametrize("text", ["", '{"model": {"vocab": {"a', "[" * 200_000], ids=["empty", "half", "deep"])
def test_small_files_names_a_damaged_tokenizer(copied: Path, text: str) -> None:
    (copied / "tokenizer.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"tokenizer\.json is damaged: "):
        open_model(copied).small_files()


def test_open_says_which_directory_to_name_when_there_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "[" * 5000,
        '{"model_type": "no-such-family"}',
        '{"model_type": "llama", "hidden_size": "x"}',
        '{"model_type": "gpt2", "torch_dtype": "none"}',
    ],
)
def test_open_fails_with_one_clear_line_when_the_config_is_unusable(copied: Path, text: str) -> None:
    (copied / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not usable") as caught:
        open_model(copied)
    assert "\n" not in str(caught.value)


def test_open_says_that_transformers_does_not_know_a_newer_model(copied: Path) -> None:
    (copied / "config.json").write_text('{"model_type": "gpt99"}')
    with pytest.raises(ConfigError, match=r"transformers 5\S+ does not know models of type 'gpt99': ") as caught:
        open_model(copied)
    assert "a newer transformers" in caught.value.remedy


def test_open_fails_with_one_clear_line_when_the_model_is_of_another_kind(copied: Path) -> None:
    (copied / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ConfigError, match=r"^clip is not a language model with transformer blocks") as caught:
        open_model(copied)
    assert "\n" not in str(caught.value)


def test_open_quotes_a_config_without_its_terminal_codes(copied: Path) -> None:
    (copied / "config.json").write_text(json.dumps({"model_type": "\x1b[31mred\u202e"}))
    with pytest.raises(ConfigError, match="red") as caught:
        open_model(copied)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "size"), [("num_hidden_layers", 0), ("num_hidden_layers", -1), ("hidden_size", 0), ("vocab_size", -5)]
)
def test_open_names_an_impossible_size_in_a_config(copied: Path, name: str, size: int) -> None:
    settings = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**settings, name: size}))
    with pytest.raises(ConfigError, match=rf"^{name} is {size}\b"):
        open_model(copied)


def test_open_without_weights_says_so(copied: Path) -> None:
    (copied / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match="holds neither"):
        open_model(copied)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_open_damaged_index_is_named(copied: Path, text: str) -> None:
    (copied / "model.safetensors.index.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"index\.json is damaged"):
        open_model(copied)


def test_open_missing_shard_is_named(copied: Path) -> None:
    shard = next(copied.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        open_model(copied)


def test_open_refuses_an_index_that_points_outside_the_directory(copied: Path) -> None:
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(ConfigError, match="passwd"):
        open_model(copied)
