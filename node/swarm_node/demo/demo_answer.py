"""Asks the gateway with the official `openai` client, as any program would, and kills a node while it answers.

The machine's speed does not matter: the answer may fill the model's whole context, and ends once it is long enough and
has continued without the killed node. `complete_undisturbed` computes the same answer in one process with transformers
alone, to show that the swarm gives the model's answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI

from swarm_node.demo.command import DemoPlan
from swarm_node.demo.display import Reporter
from swarm_node.demo.nodes import DemoError

SEED = 1
NUM_TOKENS_AFTER = 8
"""Minimum number of tokens after the failover."""


@dataclass(slots=True, kw_only=True)
class Completion:
    """An answer as it arrives. `failover_ms` is the client's longest wait for a token after a node was killed."""

    texts: list[str] = field(default_factory=list)
    killed: str = ""
    failover_ms: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_tokens(self) -> int:
        return len(self.texts)


async def complete(url: str, model: str, plan: DemoPlan, reporter: Reporter, kill: Callable[[str], str]) -> Completion:
    """Return the completion of the plan's prompt. `kill(peer_id)` kills that node and returns its name.

    Raises DemoError if the answer breaks off, or ends before the kill has an effect.
    """
    completion = Completion()
    reporter.display.token(plan.prompt)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
        try:
            await _stream(openai, model, plan, reporter, kill, completion)
        except APIError as error:
            raise DemoError(f"the answer broke off after {completion.num_tokens} tokens: {error.message}") from error
    reporter.display.token("\n")
    return completion


async def _stream(
    openai: AsyncOpenAI,
    model: str,
    plan: DemoPlan,
    reporter: Reporter,
    kill: Callable[[str], str],
    completion: Completion,
) -> None:
    """Fill `completion` token by token, until it is long enough and the failover was seen."""
    stream = await openai.completions.create(
        model=model,
        prompt=plan.prompt,
        max_tokens=plan.room_tokens,
        temperature=plan.temperature,
        seed=SEED,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    is_missed, enough, last_s = False, plan.min_new_tokens, time.monotonic()
    async with stream:
        async for chunk in stream:
            if not chunk.choices[0].text:
                continue
            now_s = time.monotonic()
            if completion.killed:
                completion.failover_ms = max(completion.failover_ms, (now_s - last_s) * 1000)
            last_s = now_s
            completion.texts.append(chunk.choices[0].text)
            reporter.token(chunk.choices[0].text)
            if completion.num_tokens == plan.kill_after_tokens:
                completion.killed = kill((await _trace(openai, chunk.id))["hops"][-1]["peer_id"])
                last_s = time.monotonic()
            elif completion.num_tokens >= enough:
                if is_missed:
                    return
                trace = await _trace(openai, chunk.id)
                if trace["replays"]:
                    # tokens that were sent before the failure may still arrive
                    is_missed, enough = True, trace["num_tokens"] + NUM_TOKENS_AFTER
    if not is_missed:
        raise DemoError("the answer ended before the killed node was noticed", remedy="use a shorter --prompt")


async def _trace(openai: AsyncOpenAI, trace_id: str) -> dict[str, Any]:
    return await openai.get(f"/traces/{trace_id}", cast_to=dict[str, Any])


def complete_undisturbed(
    checkpoint: Path, prompt: str, max_new_tokens: int, *, temperature: float = 0.0, seed: int = SEED
) -> str:
    """Return the completion of `prompt`: greedy at temperature 0, otherwise sampled with `seed`. Blocks."""
    import torch  # noqa: PLC0415
    from swarm.serving.model.attention import cache_argument  # noqa: PLC0415
    from swarm.serving.sampling.drawing import pick  # noqa: PLC0415
    from swarm_protocol.session_frames import TokenDraw  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    torch.set_num_threads(1)  # as on the nodes: for a model this small, synchronizing threads costs more than it saves
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    cached = {cache_argument(model): DynamicCache()}
    answer: list[int] = []
    new = tokenizer.encode(prompt)
    with torch.inference_mode():
        for index in range(max_new_tokens):
            logits_BTV = model(torch.tensor([new]), **cached, use_cache=True).logits
            token = pick(logits_BTV[0, -1], TokenDraw(temperature=temperature, seed=seed, index=index))
            answer.append(token)
            new = [token]
    return str(tokenizer.decode(answer))
