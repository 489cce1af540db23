"""What transformers alone does with a model on this machine, as one JSON line: the yardstick of the serving bench.

    python -m bench.local_transformers MODEL_DIR THREADS NUM_TOKENS

Greedy `generate` of one prompt and of a batch of 16, each warm, and the time to the first token of two long prompts. A
process of its own, so that it has the machine's cores and no allocator of ours.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

PROMPT_TOKENS = 32
BATCH = 16
LONG_PROMPTS = (512, 4096)


def prompt_ids(index: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return random printable ASCII, so that the ids stand for a text. No two prompts, of one length or of different
    ones, share a page that servers could keep."""
    chosen = random.Random(f"{index} {num_tokens}")
    return [chosen.randrange(33, 123) for _ in range(num_tokens)]


def seconds(model: Any, ids: torch.Tensor, num_tokens: int) -> float:
    since = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    assert out.shape[1] == ids.shape[1] + num_tokens
    return time.perf_counter() - since


def main(directory: str, num_threads: int, num_tokens: int) -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    one, batch = torch.tensor([prompt_ids(0)]), torch.tensor([prompt_ids(index) for index in range(BATCH)])
    seconds(model, one, 4)
    figures = {
        "one_tokens_per_s": num_tokens / seconds(model, one, num_tokens),
        "batch_tokens_per_s": BATCH * num_tokens / seconds(model, batch, num_tokens),
    }
    for length in LONG_PROMPTS:
        figures[f"first_token_{length}_ms"] = 1000 * seconds(model, torch.tensor([prompt_ids(0, length)]), 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
