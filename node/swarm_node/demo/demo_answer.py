"""Asks the gateway as any program would, with the official `openai` client, and pulls a plug while it answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openai import APIError, AsyncOpenAI

from swarm_node.demo.demo_plan import Plan
from swarm_node.demo.nodes import DemoError
from swarm_node.demo.reporter import Teller


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
            trace = await _stream(openai, model, plan, teller, kill, completion)
        except APIError as error:
            raise DemoError(f"the answer broke off after {completion.num_tokens} tokens: {error.message}") from error
    teller.display.token("\n")
    if not trace["replays"]:
        raise DemoError("the answer was over before the killed node was missed", remedy="ask for more tokens")
    return completion


async def _stream(
    openai: AsyncOpenAI,
    model: str,
    plan: Plan,
    teller: Teller,
    kill: Callable[[str], str],
    completion: Completion,
) -> dict[str, Any]:
    """Fill `completion` token by token; returns the trace."""
    stream = await openai.completions.create(
        model=model,
        prompt=plan.prompt,
        max_tokens=plan.max_new_tokens,
        temperature=plan.temperature,
        seed=plan.sampling_seed,
        stream=True,
    )
    trace_id, last_s = "", time.monotonic()
    async for chunk in stream:
        trace_id, choice = chunk.id, chunk.choices[0]
        if not choice.text:
            continue
        now_s = time.monotonic()
        if completion.killed:
            completion.failover_ms = max(completion.failover_ms, (now_s - last_s) * 1000)
        last_s = now_s
        completion.texts.append(choice.text)
        teller.token(choice.text)
        if completion.num_tokens == plan.kill_after_tokens:
            trace = await openai.get(f"/traces/{trace_id}", cast_to=dict[str, Any])
            completion.killed = kill(trace["hops"][-1]["peer_id"])
            last_s = time.monotonic()
    return await openai.get(f"/traces/{trace_id}", cast_to=dict[str, Any])
