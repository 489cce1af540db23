"""Asks the gateway as any program would, with the official `openai` client, and pulls a plug while it answers.

The speed of a machine decides nothing: the answer may fill the model's whole context, and is given up once it is long
enough and has gone on without the killed node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openai import APIError, AsyncOpenAI

from swarm_node.demo.demo_plan import Plan
from swarm_node.demo.nodes import DemoError
from swarm_node.demo.reporter import Teller

NUM_TOKENS_AFTER = 8
"""What has to come after the failover, at least."""


@dataclass(slots=True, kw_only=True)
class Completion:
    """An answer as it arrives. `failover_ms` is the longest wait for a token once a node was killed, as seen here."""

    texts: list[str] = field(default_factory=list)
    killed: str = ""
    failover_ms: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_tokens(self) -> int:
        return len(self.texts)


async def complete(url: str, model: str, plan: Plan, teller: Teller, kill: Callable[[str], str]) -> Completion:
    """The completion of the plan's prompt. `kill(peer_id)` ends that node and returns its name.

    Raises DemoError if the answer breaks off, or was over before the kill could matter.
    """
    completion = Completion()
    teller.display.token(plan.prompt)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
        try:
            await _stream(openai, model, plan, teller, kill, completion)
        except APIError as error:
            raise DemoError(f"the answer broke off after {completion.num_tokens} tokens: {error.message}") from error
    teller.display.token("\n")
    return completion


async def _stream(
    openai: AsyncOpenAI,
    model: str,
    plan: Plan,
    teller: Teller,
    kill: Callable[[str], str],
    completion: Completion,
) -> None:
    """Fill `completion` token by token, until it is long enough and the failover was seen."""
    stream = await openai.completions.create(
        model=model,
        prompt=plan.prompt,
        max_tokens=plan.room_tokens,
        temperature=plan.temperature,
        seed=plan.sampling_seed,
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
            teller.token(chunk.choices[0].text)
            if completion.num_tokens == plan.kill_after_tokens:
                completion.killed = kill((await _trace(openai, chunk.id))["hops"][-1]["peer_id"])
                last_s = time.monotonic()
            elif completion.num_tokens >= enough:
                if is_missed:
                    return
                trace = await _trace(openai, chunk.id)
                if trace["replays"]:
                    # what was under way before may still be on the way to us
                    is_missed, enough = True, trace["num_tokens"] + NUM_TOKENS_AFTER
    if not is_missed:
        raise DemoError("the answer was over before the killed node was missed", remedy="use a shorter --prompt")


async def _trace(openai: AsyncOpenAI, trace_id: str) -> dict[str, Any]:
    return await openai.get(f"/traces/{trace_id}", cast_to=dict[str, Any])
