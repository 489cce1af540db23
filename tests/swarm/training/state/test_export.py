"""Tests the exported directory by loading it as its users do."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.run.run_tables import END_OF_TEXT
from swarm.training.state.export import export_hf
from swarm_protocol.errors import ConfigError
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "model"
    run = RunConfig(name="run", model={**RunConfig(name="run").model, "hidden_size": 64, "intermediate_size": 96})
    export_hf(initial_theta(run), run, directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(exported: Path):
    return AutoTokenizer.from_pretrained(exported)


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 10_000])
@pytest.mark.parametrize("tied", [True, False])
def test_loaded_export_gives_equal_logits(
    tmp_path: Path, tiny_run: RunConfig, max_shard_bytes: int, tied: bool
) -> None:
    run = replace(tiny_run, model={**tiny_run.model, "tie_word_embeddings": tied})
    theta_N = initial_theta(run)
    export_hf(theta_N, run, tmp_path / "model", max_shard_bytes=max_shard_bytes)
    num_shards = len(list((tmp_path / "model").glob("*.safetensors")))
    assert (num_shards > 1) == (max_shard_bytes == 10_000)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == (num_shards > 1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    built = build_model(run.model).eval()
    Layout.of(built).set_parameters(built, theta_N)
    x_BT = torch.arange(64).view(2, 32)
    assert torch.equal(loaded(input_ids=x_BT).logits, built(input_ids=x_BT).logits)
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1, (
        "files must have equal permissions"
    )


FAMILIES = {
    "gpt2": {"vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "qwen3": {
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_loaded_export_of_other_families_gives_equal_logits_and_generates(
    tmp_path: Path, tiny_run: RunConfig, model_type: str, fragments: int
) -> None:
    run = replace(tiny_run, model={"model_type": model_type, **FAMILIES[model_type]}, fragments=fragments)
    theta_N = initial_theta(run)
    export_hf(theta_N, run, tmp_path / "model", max_shard_bytes=10_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert loaded.config.model_type == model_type
    assert type(loaded).__name__ in loaded.config.architectures
    built = build_model(run.model).eval()
    Layout.of(built, fragments).set_parameters(built, theta_N)
    x_BT = torch.arange(64).view(2, 32)
    assert torch.equal(loaded(input_ids=x_BT).logits, built(input_ids=x_BT).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = loaded.generate(**tokenizer("def", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert ids[0, :3].tolist() == [*b"def"]
    assert ids.shape[1] == 8


def test_export_has_the_runs_own_tokenizer(tmp_path: Path, tiny_run: RunConfig) -> None:
    words = Tokenizer(models.WordLevel({"<end>": 3, "one": 0, "two": 1, "three": 2}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path / "words")
    (tmp_path / "words" / "config.json").write_text('{"model_type": "bert"}')
    run = replace(tiny_run, data=replace(tiny_run.data, tokenizer="local"))
    export_hf(initial_theta(run), run, tmp_path / "model", tokenizer=tmp_path / "words")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("two three one").input_ids == [1, 2, 0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (loaded.config.model_type, loaded.config.eos_token_id) == ("llama", tokenizer.eos_token_id)
    assert loaded.generation_config.eos_token_id == 3


def test_export_begins_generation_with_the_token_that_begins_documents(tmp_path: Path, tiny_run: RunConfig) -> None:
    words = Tokenizer(models.WordLevel({"<end>": 3, "<begin>": 4, "a": 0, "b": 1}, unk_token="<end>"))
    words.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 4)])
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path / "words")
    run = replace(tiny_run, data=replace(tiny_run.data, tokenizer="local"))
    export_hf(initial_theta(run), run, tmp_path / "model", tokenizer=tmp_path / "words")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for config in (loaded.config, loaded.generation_config):
        assert (config.bos_token_id, config.eos_token_id) == (4, 3)


def test_export_accepts_a_tokenizer_file_without_end_of_text(tmp_path: Path, tiny_run: RunConfig) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "one": 1, "two": 2}, unk_token="a"))
    words.save(str(tmp_path / "words.json"))
    run = replace(tiny_run, data=replace(tiny_run.data, tokenizer="local"))
    export_hf(initial_theta(run), run, tmp_path / "model", tokenizer=tmp_path / "words.json")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("two").input_ids == [2]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.eos_token_id is None
    ids = loaded.generate(torch.tensor([[1]]), max_new_tokens=5, do_sample=False)
    assert ids.shape == (1, 6), "the answer must not end at the family's usual token"


def test_export_is_refused_without_the_runs_tokenizer(tmp_path: Path, tiny_run: RunConfig) -> None:
    run = replace(tiny_run, data=replace(tiny_run.data, tokenizer="local"))
    with pytest.raises(ConfigError, match="--tokenizer PATH"):
        export_hf(initial_theta(run), run, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


@given(text=any_text)
@example(text="")
@example(text="\x00\x7f\u0100\u0120 \r\n\t  ")
@example(text="<s></s><|endoftext|>[PAD]")
@example(text="def f(x): return 'ünï🎉'\n")
@example(text=" 's 're . , don't\u00a0\u3000\u202e")
@example(text="".join(map(chr, range(0x180))))
def test_tokenizer_encodes_any_text_as_its_utf8_bytes_and_decodes_it(tokenizer, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_decodes_invalid_utf8_to_replacement_characters(tokenizer) -> None:
    assert tokenizer.decode([0xFF, 0x61]) == "\ufffda"


def test_tokenizer_has_exactly_one_token_for_each_byte(tokenizer) -> None:
    assert len(tokenizer) == 256
    assert tokenizer.all_special_ids == []
    assert tokenizer.model_max_length == 1024


def test_generation_ends_at_the_end_of_text(exported: Path, tokenizer) -> None:
    settings = json.loads((exported / "generation_config.json").read_text())
    assert settings["eos_token_id"] == settings["pad_token_id"] == END_OF_TEXT
    model = AutoModelForCausalLM.from_pretrained(exported)
    # with all weight on one token, every step draws the end of text
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ids = model.generate(tokenizer("def", return_tensors="pt").input_ids, max_new_tokens=5, do_sample=False)
    assert ids[0].tolist() == [*b"def", END_OF_TEXT]


def test_export_leaves_no_other_files(exported: Path) -> None:
    assert [path.name for path in exported.parent.iterdir()] == ["model"]


def test_export_refuses_a_directory_that_exists(exported: Path, tiny_run: RunConfig) -> None:
    before = sorted(path.name for path in exported.iterdir())
    with pytest.raises(ConfigError, match="exists already"):
        export_hf(initial_theta(tiny_run), tiny_run, exported)
    assert sorted(path.name for path in exported.iterdir()) == before


def test_export_refuses_a_place_where_it_cannot_write(tmp_path: Path, tiny_run: RunConfig) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=f"the model cannot be written to {tmp_path}/file: not a directory"
    ) as refused:
        export_hf(initial_theta(tiny_run), tiny_run, tmp_path / "file" / "model")
    assert refused.value.remedy == "make it writable for this user", "the remedy must not speak of disk space"


def test_export_leaves_no_files_when_the_disk_is_full(
    tmp_path: Path, tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="no space left on device") as refused:
        export_hf(initial_theta(tiny_run), tiny_run, tmp_path / "model")
    assert refused.value.remedy == "free space there"
    assert list(tmp_path.iterdir()) == []


def test_export_leaves_no_files_when_the_weights_do_not_fit_on_the_disk(tmp_path: Path, tiny_run: RunConfig) -> None:
    """safetensors raises its own exception when a write fails."""
    theta_N = initial_theta(tiny_run)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))
    try:
        with pytest.raises(ConfigError, match=r"model cannot be written to .*: file too large: free") as refused:
            export_hf(theta_N, tiny_run, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.remedy == "free space there"
    assert list(tmp_path.iterdir()) == []


def test_export_succeeds_after_a_killed_one(tmp_path: Path, tiny_run: RunConfig) -> None:
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "junk").write_text("")
    export_hf(initial_theta(tiny_run), tiny_run, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "junk").exists()
