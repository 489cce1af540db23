"""One answer, token by token: session, sampling and text together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from swarm.serving.model_kit import ModelKit
from swarm.serving.sampling import Sampling, pick
from swarm.serving.session import Session
from swarm.serving.text import Detokenizer, StopFinder
from swarm.serving.trace import Trace

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One step of an answer. `text` may be empty while a character or a stop string is incomplete."""

    text: str
    token_id: int
    finish_reason: FinishReason | None = None


async def generate(
    session: Session, kit: ModelKit, prompt: Sequence[int], sampling: Sampling, max_tokens: int, trace: Trace
) -> AsyncGenerator[Token, None]:
    """At most `max_tokens` tokens, the last one with its finish reason. The session must be open."""
    detokenizer, stops = Detokenizer(kit.decode), StopFinder(sampling.stop)
    clock = asyncio.get_running_loop().time
    since_s = clock()
    trace.num_prompt_tokens = len(prompt)
    new = list(prompt)
    for index in range(max_tokens):
        logits_V = await session.advance(torch.tensor(new, dtype=torch.int64))
        token_id = pick(logits_V, sampling, index)
        trace.num_tokens += 1
        trace.total_ms = (clock() - since_s) * 1000
        trace.first_token_ms = trace.first_token_ms or trace.total_ms
        has_ended = token_id in kit.end_ids
        text = "" if has_ended else stops.push(detokenizer.push(token_id))
        if has_ended or stops.has_stopped or index + 1 == max_tokens:
            text += stops.push(detokenizer.flush())
            reason: FinishReason = "stop" if has_ended or stops.has_stopped else "length"
            yield Token(text=text + stops.flush(), token_id=token_id, finish_reason=reason)
            return
        yield Token(text=text, token_id=token_id)
        new = [token_id]
