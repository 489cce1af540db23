"""Tiny models of the families that are served, and what transformers alone makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from support.text_models import byte_tokenizer
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

NUM_BLOCKS = 6
VOCAB = 256

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama-tied": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=3),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=8),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=4),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=NUM_BLOCKS,
        n_head=4,
        n_positions=256,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=0,
        eos_token_id=1,
    ),
    # its blocks return tuples
    "bloom": lambda: BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=NUM_BLOCKS, n_head=4),
}


def write_model(directory: Path, config: Any, seed: int = 0) -> Path:
    """Random weights large enough for greedy tokens to differ, in several shards."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    model.save_pretrained(directory, max_shard_size="40KB")
    byte_tokenizer().save_pretrained(directory)
    return directory


@functools.lru_cache(maxsize=8)
def _local_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


@functools.cache
def _local_tokens(directory: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model = _local_model(directory)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return tuple(int(token) for token in out[0, len(prompt) :])


def local_tokens(directory: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers generates greedily, alone on one machine."""
    return list(_local_tokens(directory, tuple(prompt), num_tokens))


def likeliest_tokens(directory: Path, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """What transformers alone finds likeliest after `prompt`, and after each token of `answer` but the last.

    It is `answer` itself exactly if transformers generates that greedily: one pass tells, in place of one a token.
    """
    with torch.inference_mode():
        logits_TV = _local_model(directory)(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0]
    return [int(token) for token in logits_TV[len(prompt) - 1 :].argmax(-1)]
