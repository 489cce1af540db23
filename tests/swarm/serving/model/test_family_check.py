"""The check from its config alone whether a model can be served, with supported, unsupported and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm.serving.model import model_cut
from swarm.serving.model.family_check import _untried, check_config, check_directory
from swarm.serving.model.model_files import MAX_CONFIG_BYTES
from swarm_protocol.errors import ConfigError
from transformers import CONFIG_MAPPING, LlamaConfig, OPTConfig
from transformers.models.hrm_text.modeling_hrm_text import HrmTextMLP

SERVED = ["llama", "gemma3_text", "deepseek_v3", "gpt_neo", "gpt_oss", "nanochat", "phi3", "modernbert-decoder"]


@pytest.mark.parametrize("family", SERVED)
def test_check_accepts_a_supported_family_of_any_size(family: str) -> None:
    config = CONFIG_MAPPING[family]()
    before = config.to_dict()
    found = check_config(config)
    assert (found.family, found.num_blocks, found.untried) == (family, config.num_hidden_layers, "")
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("t5", "t5 is not a decoder-only language model"),
        ("gemma3", "gemma3 is not a language model with transformer blocks"),
        ("mamba", "mamba has blocks that share state"),
        ("roberta", "roberta gives another result than transformers"),
        ("rwkv", "rwkv does not run in parts"),
        ("dots1", "transformers cannot build a dots1 from this config"),
    ],
)
def test_check_of_another_family_names_it_and_the_reason(family: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_config(CONFIG_MAPPING[family]())


def test_check_refuses_a_family_whose_cut_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    check_config(OPTConfig())
    _untried.cache_clear()
    monkeypatch.setattr(model_cut, "_BEFORE_BLOCKS", {("opt", "final_layer_norm"): True})
    with pytest.raises(ConfigError, match="opt gives another result in parts than as a whole"):
        check_config(OPTConfig())


def test_check_of_a_model_that_lies_in_another_directory_does_not_try_it_again(tmp_path: Path) -> None:
    for name in ("one", "other"):
        LlamaConfig(num_hidden_layers=3).save_pretrained(tmp_path / name)
    check_directory(tmp_path / "one")
    num_tried = _untried.cache_info().misses
    check_directory(tmp_path / "other")
    assert _untried.cache_info().misses == num_tried


def test_check_says_why_a_model_without_a_miniature_was_not_tried() -> None:
    found = check_config(CONFIG_MAPPING["deepseek_v2"]())  # it names no number of experts
    assert "topk" in found.untried


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(vocab_size=1), LlamaConfig(max_position_embeddings=9), LlamaConfig(max_position_embeddings=-1)],
)
def test_check_of_a_model_smaller_than_a_miniature_or_without_a_longest_sequence_tries_it(config: Any) -> None:
    assert check_config(config).untried == ""


def test_check_leaves_random_numbers_and_threads_as_they_were() -> None:
    num_threads = torch.get_num_threads()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    check_config(LlamaConfig())
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == num_threads


HUGE = {
    "model_type": "mixtral",
    "hidden_size": 2**24,
    "intermediate_size": 2**31,
    "vocab_size": 2**24,
    "num_hidden_layers": 4000,
    "num_attention_heads": 4096,
    "num_key_value_heads": 2**10,
    "num_local_experts": 4000,
    "num_experts_per_tok": 2000,
    "max_position_embeddings": 2**40,
}


def written(directory: Path, settings: Any) -> Path:
    (directory / "config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return directory


def test_check_of_a_config_of_billions_takes_a_miniature(tmp_path: Path) -> None:
    assert check_directory(written(tmp_path, HUGE)).num_blocks == 4000


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (HUGE | {"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648, more than 4096"),
        (HUGE | {"num_local_experts": 2**31}, "num_local_experts is 2147483648, more than 4096"),
        (HUGE | {"num_labels": 2**31}, "num_labels is 2147483648, more than 4096"),
        ({"model_type": "hrm_text", "H_cycles": 2**31}, "H_cycles is 2147483648, more than 4096"),
        (HUGE | {"text_config": {"num_layers": 2**31}}, "num_layers is 2147483648, more than 4096"),
        (HUGE | {"num_hidden_layers": -3}, "num_hidden_layers|not a language model with transformer blocks"),
        (HUGE | {"hidden_size": 10**12}, "hidden_size is 1000000000000, more than 16793600"),
        (HUGE | {"vocab_size": 2**31}, "vocab_size is 2147483648, more than 16793600"),
        (HUGE | {"num_attention_heads": 0}, "num_attention_heads is 0"),
        (HUGE | {"num_attention_heads": "many"}, "not usable"),
        ({"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}, "not usable"),
        ([1, 2], "it is not an object"),
        ("[" * 100_000, "not usable"),
        ('{"a": "' + "x" * MAX_CONFIG_BYTES + '"}', "larger than"),
        ("", "not usable"),
    ],
    ids=[
        "layers",
        "experts",
        "labels",
        "cycles",
        "nested",
        "negative",
        "width",
        "vocabulary",
        "heads",
        "text",
        "code",
        "list",
        "deep",
        "large",
        "empty",
    ],
)
def test_check_of_a_hostile_config_is_refused(tmp_path: Path, settings: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_directory(written(tmp_path, settings))


@pytest.mark.parametrize("num_layers", [4, 32])
def test_check_runs_layers_few_times_however_many_cycles_a_config_has(
    monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    num_run, most, original = 0, 200, HrmTextMLP.forward

    def counted(layer: Any, x: Any) -> Any:
        nonlocal num_run
        num_run += 1
        if num_run > most:
            raise RuntimeError("this would go on for years")
        return original(layer, x)

    monkeypatch.setattr(HrmTextMLP, "forward", counted)
    sizes = {"num_hidden_layers": num_layers, "num_layers_per_stack": 4, "H_cycles": 4096, "L_cycles": 4096}
    with pytest.raises(ConfigError, match="hrm_text"):
        check_config(CONFIG_MAPPING["hrm_text"](**sizes))
    assert 0 < num_run <= most


def test_check_of_a_span_beyond_the_model_is_refused(tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=9).save_pretrained(tmp_path)
    assert check_directory(tmp_path, (5, 9)).num_blocks == 9
    with pytest.raises(ConfigError, match="blocks 5:20 are not within this model's 0:9"):
        check_directory(tmp_path, (5, 20))
