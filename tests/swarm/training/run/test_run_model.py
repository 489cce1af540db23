"""Tests which models of runs are refused before they cost memory, and that initial weights are equal on every
machine."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, check_model, initial_theta, module_run
from swarm.training.run.run_tables import DataConfig
from swarm_protocol.errors import ConfigError


def _changed(run: RunConfig, **keys: Any) -> RunConfig:
    return replace(run, model={**run.model, **keys})


def test_default_model_has_about_a_million_parameters() -> None:
    assert check_model(RunConfig(name="run")) == 1_121_920


def test_check_model_counts_tied_weights_once(tiny_run: RunConfig) -> None:
    assert check_model(_changed(tiny_run, tie_word_embeddings=False)) == check_model(tiny_run) + 256 * 16


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": 3}, "no model_type"),
        ({"hidden_sise": 16}, "did you mean 'hidden_size'"),
        ({"auto_map": {"AutoModel": "their--code"}}, "unknown key 'auto_map'"),
        ({"quantization_config": {}}, "unknown key 'quantization_config'"),
        ({"_attn_implementation": "their/kernel"}, "unknown key '_attn_implementation'"),
        ({"trust_remote_code": True}, "unknown key 'trust_remote_code'"),
        ({"dtype": "float16"}, "unknown key 'dtype'"),
        ({"hidden_size": 1 << 40}, "hidden_size = 1099511627776 is too large"),
        ({"num_hidden_layers": 5000}, "has 5000 layers: use 1 to 1024"),
        ({"num_hidden_layers": 0}, "has 0 layers"),
        ({"num_hidden_layers": -3}, "has -3 layers"),
        ({"hidden_size": 1 << 20, "intermediate_size": 1 << 20, "num_attention_heads": 16}, "parameters, over"),
        ({"hidden_size": "wide"}, r'^\[model\] hidden_size = "wide": use a whole number$'),
        ({"hidden_size": -4}, "hidden_size = -4: use at least 1"),
        ({"intermediate_size": 0}, "intermediate_size = 0: use at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: use a divisor of num_attention_heads, 2"),
        ({"tie_word_embeddings": [True, {"a": 1}]}, r'tie_word_embeddings = \[true, {"a" = 1}\]: use true or false'),
        ({"bos_token_id": -5}, "bos_token_id = -5: use ids from 0 to vocab_size - 1, 255"),
        ({"eos_token_id": [1, 256]}, r"eos_token_id = \[1, 256\]: use ids from 0"),
        ({"num_attention_heads": 3}, r"\[model\]"),
        ({"hidden_act": "none"}, r"\[model\] cannot be built: there is no 'none'"),
        ({"vocab_size": 255}, "vocab_size = 255: use at least 256"),
        ({"vocab_size": -1}, "vocab_size = -1: use at least 256"),
        ({"max_position_embeddings": 15}, "at least data.window_tokens, 16"),
    ],
)
def test_check_model_refuses_an_impossible_model(tiny_run: RunConfig, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(_changed(tiny_run, **keys))


def test_check_model_refuses_a_model_with_empty_weights(tiny_run: RunConfig) -> None:
    model = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_inner": 0}
    with pytest.raises(ConfigError, match=r"h\.0\.mlp\.c_fc\.weight no values: it is 16 by 0: use sizes of at least 1"):
        check_model(replace(tiny_run, model=model))


def test_check_model_refuses_a_model_that_is_no_language_model(tiny_run: RunConfig) -> None:
    for model_type in ("vit", "t5"):
        with pytest.raises(ConfigError, match=f'model_type = "{model_type}": use a decoder-only model'):
            check_model(replace(tiny_run, model={"model_type": model_type}))


@pytest.mark.parametrize("family", ["dots3_note_text", "gemma4_assistant", "nougat"])
def test_check_model_refuses_a_family_whose_settings_transformers_cannot_give(family: str) -> None:
    with pytest.raises(ConfigError, match=r"transformers refuses \[model\]"):
        check_model(RunConfig(name="run", model={"model_type": family}))


def test_check_model_refuses_a_pattern_of_too_many_layers_before_expanding_it(tiny_run: RunConfig) -> None:
    pattern = {"model_type": "gpt_neo", "num_layers": 2, "hidden_size": 16, "num_heads": 4}
    for repetitions in (5000, 1 << 62):
        with pytest.raises(ConfigError, match="attention_types has too many layers: use 1 to 1024"):
            check_model(replace(tiny_run, model={**pattern, "attention_types": [[["global", "local"], repetitions]]}))
    assert check_model(replace(tiny_run, model={**pattern, "attention_types": [[["global", "local"], 1]]})) > 0


def test_check_model_refuses_more_fragments_than_layers(tiny_run: RunConfig) -> None:
    assert check_model(replace(tiny_run, fragments=2)) == check_model(tiny_run)
    with pytest.raises(ConfigError, match="fragments = 3: the model has 2 layers: use at most 2"):
        check_model(replace(tiny_run, fragments=3))


BERT = {
    "model_type": "bert",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def test_initial_theta_of_an_encoder_is_refused_unless_it_is_a_decoder(tiny_run: RunConfig) -> None:
    run = replace(tiny_run, model=BERT)
    check_model(run)
    with pytest.raises(ConfigError, match="bert sees the tokens that it is to predict: set is_decoder = true"):
        initial_theta(run)
    decoder = replace(run, model={**BERT, "is_decoder": True})
    assert len(initial_theta(decoder)) == check_model(run)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rms_norm_eps": -1.0}, "gives numbers that are not finite"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "cannot be run: selected index"),
    ],
)
def test_initial_theta_of_a_model_that_cannot_be_trained_is_refused(
    tiny_run: RunConfig, keys: dict[str, Any], message: str
) -> None:
    run = _changed(tiny_run, **keys)
    check_model(run)
    with pytest.raises(ConfigError, match=rf"^\[model\] {message}"):
        initial_theta(run)


def test_initial_theta_has_the_same_weights_for_any_number_of_fragments(tiny_run: RunConfig) -> None:
    model = build_model(tiny_run.model)
    one = Layout.of(model).unflatten(initial_theta(tiny_run))
    two = Layout.of(model, 2).unflatten(initial_theta(replace(tiny_run, fragments=2)))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_initial_theta_has_the_same_bits_on_every_machine(tiny_run: RunConfig) -> None:
    torch.manual_seed(1)
    theta_N = initial_theta(tiny_run)
    torch.manual_seed(2)
    assert torch.equal(initial_theta(tiny_run), theta_N)
    assert hashlib.sha256(theta_N.numpy().tobytes()).hexdigest()[:16] == "a75fe892512168b4"


def test_initial_theta_consists_of_noise_of_the_configured_size_and_of_ones() -> None:
    run = RunConfig(name="run")
    pieces = Layout.of(build_model(run.model)).unflatten(initial_theta(run))
    for name, piece in pieces.items():
        if piece.dim() < 2:
            assert bool((piece == 1.0).all()), name
        else:
            assert abs(float(piece.std()) - 0.02) < 0.001, name
            assert abs(float(piece.mean())) < 0.001, name
    assert not torch.equal(initial_theta(replace(run, seed=1)), initial_theta(run))


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
        {
            "model_type": "qwen3",
            "vocab_size": 300,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
    ],
)
def test_initial_theta_of_other_architectures_predicts_nearly_uniformly(model: dict[str, Any]) -> None:
    run = RunConfig(name="run", model=model, data=DataConfig(window_tokens=16))
    built = build_model(run.model).eval()
    Layout.of(built).set_parameters(built, initial_theta(run))
    with torch.no_grad():
        logits = built(input_ids=torch.arange(16)[None]).logits
    assert logits.shape == (1, 16, model["vocab_size"])
    assert float(logits.abs().max()) < 2.0


def test_initial_theta_has_the_same_bits_when_the_architecture_draws_vectors_itself(tiny_run: RunConfig) -> None:
    """GPT-OSS draws its attention sinks from torch's global generator."""
    sinks = {"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 8}
    shape = {key: value for key, value in tiny_run.model.items() if key != "model_type"}
    run = replace(tiny_run, model={**shape, **sinks})
    assert torch.equal(initial_theta(run), initial_theta(run))


def test_check_model_refuses_a_family_without_a_maximum_context(tiny_run: RunConfig) -> None:
    model = {"model_type": "recurrent_gemma", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3}
    with pytest.raises(ConfigError, match="max_position_embeddings = 0"):
        check_model(replace(tiny_run, model=model))


@pytest.mark.parametrize(
    ("where", "kind"), [({"dtype": torch.complex64}, "complex"), ({"device": "meta"}, "on the meta")]
)
def test_module_run_refuses_parameters_that_fp32_cannot_hold(where: dict[str, Any], kind: str) -> None:
    with pytest.raises(ConfigError, match=f"the parameter bias is {kind}"):
        module_run(RunConfig(name="run"), torch.nn.Linear(2, 1, **where))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_module_run_refuses_parameters_that_are_not_finite(value: float) -> None:
    module = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(module.bias, value)
    with pytest.raises(ConfigError, match="the parameter bias is not finite everywhere"):
        module_run(RunConfig(name="run"), module)
