"""The 44M Llama of the serving benches, and how it is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.local_transformers import prompt_ids
from support.text_models import byte_tokenizer
from swarm.client import AsyncClient
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_TOKENS = 64
NUM_BLOCKS = 12
MODEL = "bench-44m"


def write_model(directory: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Write a Llama of 12 blocks with random weights, and no token that ends a text. It has 44M parameters beside those
    of its tokens, one for each byte if `tokenizer` has no others."""
    tokenizer = tokenizer or byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1704,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=8,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    assert 43e6 < model.num_parameters(exclude_embeddings=True) - model.lm_head.weight.numel() < 45e6
    model.save_pretrained(directory, max_shard_size="50MB")
    tokenizer.save_pretrained(directory)
    return directory


def use_drafts(client: AsyncClient, *, drafts: bool) -> None:
    """Have the client ask for drafts or not. Answers of random weights repeat themselves, so that they gain more than
    texts do: only `test_bench_drafts` measures with them."""
    client._session = replace(client._session, drafts=drafts)


async def answer(client: AsyncClient, index: int, *, num_prompt_tokens: int = 32, num_tokens: int = NUM_TOKENS) -> Any:
    """Generate one greedy answer and return its trace."""
    prompt = bytes(prompt_ids(index, num_prompt_tokens)).decode()
    generation = client.generate(model=MODEL, prompt=prompt, max_tokens=num_tokens)
    num_seen = 0
    async for _token in generation:
        num_seen += 1
    assert num_seen == num_tokens
    return generation.trace()
