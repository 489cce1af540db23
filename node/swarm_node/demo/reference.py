"""The proof that the swarm's answer is the model's: the same checkpoint, in one piece, by transformers alone.

Blocking, and imports torch: run it off the loop.
"""

from __future__ import annotations

from pathlib import Path


def complete(checkpoint: Path, prompt: str, max_new_tokens: int, *, temperature: float = 0.0, seed: int = 0) -> str:
    """The completion of `prompt`, without the prompt: greedy at temperature 0, else by the draws of `seed`.

    No token ends it."""
    import torch  # noqa: PLC0415
    from swarm.serving.sampling.sampling import Sampling, pick  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    torch.set_num_threads(1)  # as the nodes: threads that wait for each other cost more than a model this small
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    sampling, cache = Sampling(temperature=temperature, seed=seed), DynamicCache()
    answer: list[int] = []
    new = tokenizer.encode(prompt)
    with torch.inference_mode():
        for index in range(max_new_tokens):
            logits_BTV = model(torch.tensor([new]), past_key_values=cache, use_cache=True).logits
            token = pick(logits_BTV[0, -1], sampling, index)
            answer.append(token)
            new = [token]
    return str(tokenizer.decode(answer))
