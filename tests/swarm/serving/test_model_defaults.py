"""The sampling options of a model's generation_config.json, which count where a request leaves them out, as for
transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.text_models import byte_tokenizer
from support.tokenizer_here import TokenizerHere
from swarm.serving.model.model_files import open_model
from swarm.serving.sampling.sampling import OWN_DEFAULTS
from swarm.serving.tokenizer.model_assets import open_assets
from swarm.testing import virtual_time
from swarm_protocol.errors import IntegrityError
from transformers import AutoModelForCausalLM, GenerationConfig

HALVES = [(0, 3), (3, 6)]
NUM_TOKENS = 16
OWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}


def own_defaults(llama_dir: Path, written: bytes) -> dict[str, float]:
    files = {**open_model(llama_dir).small_files(), "generation_config.json": written}
    return dict(asyncio.run(open_assets("tiny", "r", TokenizerHere("tiny", files))).sampling)


def with_config(llama_dir: Path, tmp_path: Path, config: dict[str, Any]) -> Path:
    directory = shutil.copytree(llama_dir, tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "config",
    [
        OWN,
        {"do_sample": True, "temperature": 0.6, "top_k": 50, "eos_token_id": [3, 4]},
        {"do_sample": True, "top_p": None, "top_k": 7},
        {"repetition_penalty": 1.1},
        {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
        {"do_sample": False, "temperature": 0.6},
        {},
    ],
    ids=lambda config: ",".join(config) or "empty",
)
def test_defaults_of_a_model_are_those_of_transformers(llama_dir: Path, config: dict[str, Any]) -> None:
    transformers = {**GenerationConfig._get_default_generation_params(), "min_p": 0.0}
    transformers |= {name: value for name, value in config.items() if value is not None}
    if not transformers["do_sample"]:
        transformers |= {"temperature": 0.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}  # greedy
    ours = {"temperature": 0.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}
    ours |= own_defaults(llama_dir, json.dumps(config).encode())
    assert ours == {name: transformers[name] for name in OWN_DEFAULTS}


def test_defaults_that_transformers_does_not_know_are_understood(llama_dir: Path) -> None:
    assert own_defaults(llama_dir, b'{"do_sample": true, "top_k": -1}') == {"temperature": 1.0, "top_k": 0}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (b'{"do_sample": true, "temperature": 1e9}', "temperature is 1000000000.0"),
        (b'{"do_sample": true, "temperature": NaN}', "temperature is nan"),
        (b'{"do_sample": true, "temperature": ' + b"9" * 400 + b"}", "temperature is 999"),
        (b'{"do_sample": true, "temperature": "hot"}', "temperature is 'hot'"),
        (b'{"do_sample": true, "top_p": 0}', "top_p is 0"),
        (b'{"do_sample": true, "top_k": 1.5}', "top_k"),
        (b'{"do_sample": true, "top_k": ' + b"9" * 400 + b"}", "top_k"),
        (b'{"do_sample": true, "min_p": [1]}', "min_p"),
        (b'{"repetition_penalty": true}', "repetition_penalty is True"),
        (b'{"repetition_penalty": -1}', "repetition_penalty is -1"),
    ],
)
def test_hostile_defaults_are_refused_with_one_line(llama_dir: Path, written: bytes, told: str) -> None:
    with pytest.raises(IntegrityError, match=f"the files of tiny cannot be used: .*{told}") as caught:
        own_defaults(llama_dir, written)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_answer_without_options_is_the_one_that_transformers_generates(
    boxes: Any, llama_dir: Path, tmp_path: Path
) -> None:
    """A `top_k` of 1 leaves no chance: the repetition penalty and the end tokens decide."""
    config = {"do_sample": True, "temperature": 0.6, "top_k": 1, "repetition_penalty": 1.5}
    prompt = torch.tensor([byte_tokenizer()("def fib(n):")["input_ids"]])

    def generated(directory: Path) -> list[int]:
        model = AutoModelForCausalLM.from_pretrained(directory)
        answer = model.generate(prompt, max_new_tokens=NUM_TOKENS, pad_token_id=0)
        return [int(token) for token in answer[0, prompt.shape[1] :]]

    whole = generated(with_config(llama_dir, tmp_path / "whole", {**config, "eos_token_id": None}))
    ending = with_config(llama_dir, tmp_path / "ending", {**config, "eos_token_id": [whole[9], whole[5]]})

    async def scenario() -> None:
        async with boxes(ending, HALVES) as box:
            asked = {"prompt": prompt[0].tolist()}
            assert await box.tokens(NUM_TOKENS, **asked) == generated(ending)
            assert await box.tokens(NUM_TOKENS, **asked, ignore_eos=True) == whole
            assert await box.tokens(NUM_TOKENS, **asked, ignore_eos=True, repetition_penalty=1.0) != whole

    virtual_time.run(scenario())


def test_each_option_that_is_given_replaces_the_model_s_own(boxes: Any, llama_dir: Path, tmp_path: Path) -> None:
    given = {name: value for name, value in OWN.items() if name != "do_sample"}

    async def scenario() -> None:
        async with boxes(with_config(llama_dir, tmp_path, OWN), HALVES) as box:
            assert dict(await box.client.default_sampling("tiny")) == given
            expected = await box.tokens(seed=1)
            assert await box.tokens(seed=1, **given) == expected
            assert await box.tokens(seed=2) != expected
            for name, value in {"temperature": 2.0, "repetition_penalty": 2.0}.items():
                changed = await box.tokens(seed=1, **{name: value})
                assert changed != expected, name
                assert changed == await box.tokens(seed=1, **{**given, name: value})
            greedy = await box.tokens(temperature=0, repetition_penalty=1.0)
            assert greedy == box.expected()

    virtual_time.run(scenario())
