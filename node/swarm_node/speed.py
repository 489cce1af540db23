"""How fast this machine computes: tokens a second through one real transformer block.

The block is a Llama block of a fixed size in fp32, so that figures are comparable between nodes; whoever plans with
them scales them to a real model. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from swarm_node.hardware import Speeds

# one block of about 5M parameters: large enough to be compute-bound, small enough to be measured in a moment
HIDDEN, HEADS, INTERMEDIATE = 512, 8, 1376
PREFILL_TOKENS = 128
TRAINING_ROWS, TRAINING_TOKENS = 2, 128
BUDGET_S = 0.4  # for each of the three figures


def measure(device: str) -> Speeds:
    """Run the reference block on torch's `device`; about 1.5 s in all."""
    # it takes a second to import, which most starts can save: their speeds are remembered
    from transformers import DynamicCache, LlamaConfig, LlamaModel  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2**16,
    )
    model = LlamaModel(config).to(device)
    prompt_BTD = torch.zeros(1, PREFILL_TOKENS, HIDDEN, device=device)
    batch_BTD = torch.randn(TRAINING_ROWS, TRAINING_TOKENS, HIDDEN, device=device)
    cache = DynamicCache(config=config)

    def prefill() -> None:
        with torch.inference_mode():
            model(inputs_embeds=prompt_BTD, use_cache=False)

    def decode() -> None:
        with torch.inference_mode():
            model(inputs_embeds=prompt_BTD[:, :1], past_key_values=cache, use_cache=True)

    def train() -> None:
        model(inputs_embeds=batch_BTD, use_cache=False).last_hidden_state.square().mean().backward()

    def finished() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        elif device == "mps":
            torch.mps.synchronize()

    return Speeds(
        prefill_tokens_per_s=PREFILL_TOKENS / _best_s(prefill, finished),
        decode_tokens_per_s=1 / _best_s(decode, finished),
        training_tokens_per_s=TRAINING_ROWS * TRAINING_TOKENS / _best_s(train, finished),
    )


def _best_s(run: Callable[[], None], finished: Callable[[], None]) -> float:
    """Seconds of the fastest `run` within BUDGET_S, after one to warm up: the slower ones shared the machine."""
    run()
    finished()
    best_s = float("inf")
    until = time.perf_counter() + BUDGET_S
    while time.perf_counter() < until or best_s == float("inf"):
        start = time.perf_counter()
        run()
        finished()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s
