"""The proof that the swarm's answer is the model's: the same checkpoint, in one piece, by transformers alone.

Blocking, and imports torch: run it off the loop.
"""

from __future__ import annotations

from pathlib import Path


def complete(checkpoint: Path, prompt: str, max_new_tokens: int) -> str:
    """The greedy completion of `prompt`, without the prompt."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    torch.set_num_threads(1)  # as the nodes: threads that wait for each other cost more than a model this small
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids_BT = torch.tensor([tokenizer.encode(prompt)])
    with torch.inference_mode():
        out_BT = model.generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=max_new_tokens, do_sample=False
        )
    new_T = out_BT[0, ids_BT.shape[1] :].tolist()
    if new_T[-1] == model.generation_config.eos_token_id:
        new_T.pop()  # it ends the text and is no part of it
    return str(tokenizer.decode(new_T))
