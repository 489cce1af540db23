"""A run that starts from a checkpoint: its weights to the last bit, or a refusal that names what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.local_hub import COMMIT, MODEL, Hub, local_hub
from support.tiny_models import FAMILIES, write_model
from swarm.serving.model.model_files import open_model
from swarm.start_checkpoint import CheckpointSource, bringing, model_settings, pin_of
from swarm.training.data.tokenizing import PreparationStopped
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, module_run
from swarm.training.run.run_tables import DataConfig, StartConfig
from swarm_protocol.errors import ConfigError, IntegrityError
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3TextConfig, Qwen3MoeConfig


def run_of(directory: Path, start: StartConfig | None = None) -> RunConfig:
    """A run for the model in `directory`, which does not pin it."""
    model = model_settings(open_model(directory).config)
    start = start or StartConfig(checkpoint="local")
    return RunConfig(name="further", model=model, start=start, data=DataConfig(window_tokens=16))


def pinned(run: RunConfig, source: CheckpointSource) -> RunConfig:
    pin = pin_of(run, source)
    assert pin.differing == ()
    return replace(run, start=replace(run.start, revision=pin.revision, digest=pin.digest))


def copy_at(place: Path | None, tmp_path: Path) -> CheckpointSource:
    return CheckpointSource(place=place, cache=tmp_path / "cache")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_model(tmp_path / "checkpoint", FAMILIES["llama-tied"]())


def values_of(directory: Path, run: RunConfig) -> torch.Tensor:
    """Return the values as transformers alone reads them."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return Layout.of(model, run.fragments).flatten(model)


# bloom has no maximum context length, which a run needs
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"bloom"}))
def test_bring_gives_the_values_that_transformers_reads(tmp_path: Path, family: str) -> None:
    directory = write_model(tmp_path / "model", FAMILIES[family]())
    source = copy_at(directory, tmp_path)
    run = pinned(replace(run_of(directory), fragments=2), source)
    assert torch.equal(bringing(run, source)(), values_of(directory, run))


def test_bring_half_precision_is_taken_to_the_last_bit(tmp_path: Path, checkpoint: Path) -> None:
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(half)
    run = pinned(run_of(half), copy_at(half, tmp_path))
    theta_N = bringing(run, copy_at(half, tmp_path))()
    assert torch.equal(theta_N, values_of(half, run))
    assert not torch.equal(theta_N, values_of(checkpoint, run))


def test_bring_from_the_hub_comes_at_the_signed_commit_once(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_hub(checkpoint, tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        source = copy_at(None, tmp_path)
        run = pinned(run_of(checkpoint, StartConfig(checkpoint=MODEL)), source)
        assert run.start.revision == COMMIT
        sent = num_weight_bytes(hub)
        assert torch.equal(bringing(run, source)(), values_of(checkpoint, run))
        assert num_weight_bytes(hub) == sent > 0


def test_bring_at_a_commit_that_the_hub_does_not_have_takes_no_other_one(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_hub(checkpoint, tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        source = copy_at(None, tmp_path)
        run = pinned(run_of(checkpoint, StartConfig(checkpoint=MODEL)), source)
        other = replace(run, start=replace(run.start, revision=COMMIT[::-1]))
        with pytest.raises(ConfigError, match="revision"):
            bringing(other, source)()


def test_bring_from_the_hub_downloads_nothing_that_does_not_fit(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(checkpoint, StartConfig(checkpoint=MODEL, digest="ab" * 32))
    with local_hub(checkpoint, tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        small = replace(run, model={**run.model, "num_hidden_layers": 5})
        with pytest.raises(ConfigError, match="does not fit"):
            bringing(small, copy_at(None, tmp_path))()
        monkeypatch.setattr("swarm.start_checkpoint.SPARE_BYTES", 0)
        monkeypatch.setattr("swarm.start_checkpoint.MAX_VALUE_BYTES", 2)
        with pytest.raises(ConfigError, match=r"far more than the run's \d+ parameters"):
            bringing(run, copy_at(None, tmp_path))()
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_bring_that_is_stopped_ends_its_download(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(checkpoint, StartConfig(checkpoint=MODEL, digest="ab" * 32))
    with local_hub(checkpoint, tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        with pytest.raises(PreparationStopped):
            bringing(run, copy_at(None, tmp_path), lambda: True)()
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def num_weight_bytes(hub: Hub) -> int:
    return sum(count for name, count in hub.sent.items() if name.endswith(".safetensors"))


def test_bring_changed_weights_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    source = copy_at(checkpoint, tmp_path)
    run = pinned(run_of(checkpoint), source)
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match="other weights than those that the run starts from"):
        bringing(run, source)()


def test_bring_for_a_run_that_pins_nothing_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="does not pin the checkpoint"):
        bringing(run_of(checkpoint), copy_at(checkpoint, tmp_path))()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 16}, r"is \(256, 32\) in it and \(256, 16\) in the run; .* differ in .*hidden_size"),
        ({"num_hidden_layers": 7}, r"layers\.6.* is missing in it and .* differ in .*num_hidden_layers"),
        ({"num_hidden_layers": 5}, r"layers\.5.* and missing in the run"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight is missing in it .* differ in .*tie_word_embeddings"),
    ],
)
def test_pin_of_a_checkpoint_that_does_not_fit_says_where(
    tmp_path: Path, checkpoint: Path, changes: dict[str, Any], told: str
) -> None:
    run = run_of(checkpoint)
    run = replace(run, model={**run.model, **changes})
    with pytest.raises(ConfigError, match=told) as caught:
        pin_of(run, copy_at(checkpoint, tmp_path))
    assert "run init FILE --start CHECKPOINT" in caught.value.remedy


def test_pin_of_another_family_s_checkpoint_says_so(tmp_path: Path, checkpoint: Path) -> None:
    run = replace(run_of(checkpoint), model={"model_type": "gpt2", "vocab_size": 256, "n_embd": 8, "n_head": 1})
    with pytest.raises(ConfigError, match="differ in model_type"):
        pin_of(run, copy_at(checkpoint, tmp_path))


def test_pin_of_a_model_that_computes_something_else_names_the_settings(tmp_path: Path, checkpoint: Path) -> None:
    run = run_of(checkpoint)
    run = replace(run, model={**run.model, "rms_norm_eps": 0.1})
    assert pin_of(run, copy_at(checkpoint, tmp_path)).differing == ("rms_norm_eps",)


_SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "config", [Gemma3TextConfig(**_SIZES), Qwen3MoeConfig(**_SIZES, **_EXPERTS)], ids=lambda each: each.model_type
)
def test_pin_of_a_checkpoint_whose_config_has_keys_that_its_family_does_not_name(tmp_path: Path, config: Any) -> None:
    directory = write_model(tmp_path / "model", config)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "note_of_another_tool": True}))
    run = run_of(directory)
    assert pin_of(run, copy_at(directory, tmp_path)).differing == ("note_of_another_tool",)
    built: Any = build_model(run.model)
    Layout.of(built).set_parameters(built, values_of(directory, run))
    x_BT = torch.arange(100, 140)[None]
    with torch.no_grad():
        assert torch.equal(built(x_BT).logits, AutoModelForCausalLM.from_pretrained(directory)(x_BT).logits)


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_pin_of_a_checkpoint_with_trained_values_that_are_no_parameters_is_refused(tmp_path: Path, bias: float) -> None:
    """DeepSeek-V3 balances its experts by a buffer, which is no part of a run's state."""
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    directory = write_model(tmp_path / "checkpoint", config)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(bias)
    model.save_pretrained(tmp_path / "trained")
    run = run_of(tmp_path / "trained")
    if bias:
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.gate\.e_score_correction_bias is no parameter"):
            pin_of(run, copy_at(tmp_path / "trained", tmp_path))
    else:
        assert pin_of(run, copy_at(tmp_path / "trained", tmp_path)).differing == ()


def test_dropout_of_a_checkpoint_is_no_setting_of_a_run_that_starts_from_it(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.update({"attention_dropout": 0.1})
    directory = write_model(tmp_path / "checkpoint", config)
    run = run_of(directory)
    assert "attention_dropout" not in run.model
    assert pin_of(run, copy_at(directory, tmp_path)).differing == ()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda x: x.double(), "is of kind F64"),
        (lambda x: x.to(torch.int8), "is of kind I8"),
        (lambda x: x * torch.nan, "not finite"),
        (lambda x: x[:-1].clone(), "lacks tensors of the right shape"),
    ],
)
def test_pin_of_weights_that_are_no_start_is_refused(
    tmp_path: Path, checkpoint: Path, spoil: Callable[[torch.Tensor], torch.Tensor], told: str
) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    save_file({name: spoil(x) for name, x in load_file(shard).items()}, shard, metadata={"format": "pt"})
    with pytest.raises((ConfigError, IntegrityError), match=told):
        pin_of(run_of(checkpoint), copy_at(checkpoint, tmp_path))


def test_bring_without_a_copy_says_how_to_name_one(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="each member has its own copy") as caught:
        bringing(run_of(checkpoint), copy_at(None, tmp_path))()
    assert caught.value.remedy == "name its directory: --start DIR"


def test_bringing_a_copy_for_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="starts from no checkpoint"):
        bringing(RunConfig(name="fresh"), copy_at(tmp_path, tmp_path))


def test_an_own_module_with_a_checkpoint_is_refused_by_name() -> None:
    run = RunConfig(name="own", start=StartConfig(checkpoint="someone/tiny"))
    with pytest.raises(ConfigError, match="cannot be used with a module"):
        module_run(run, torch.nn.Linear(2, 2))
