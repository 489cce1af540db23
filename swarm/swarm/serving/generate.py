"""One answer, token by token: session, sampling and text together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from swarm_protocol.lane_messages import Pick, Picked

from swarm.serving.model.kit import ModelKit
from swarm.serving.sampling import Sampling
from swarm.serving.session.session import Session
from swarm.serving.session.trace import Trace
from swarm.serving.text import Detokenizer, StopFinder

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """A token that could have come, and how likely that was. `data` are its bytes, which may end within a character."""

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One step of an answer. `text` may be empty while a character or a stop string is incomplete.

    Where probabilities were asked for, `data` are the token's own bytes, `logprob` is its own and `top` has the
    likeliest. An end token has none of them, for it is no part of the answer.
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    data: bytes = b""
    top: tuple[Likely, ...] = ()


async def generate(
    session: Session,
    kit: ModelKit,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    trace: Trace,
    *,
    num_logprobs: int | None = None,
) -> AsyncGenerator[Token, None]:
    """At most `max_tokens` tokens, the last one with its finish reason. The session must be open."""
    detokenizer, stops = Detokenizer(kit.decode), StopFinder(sampling.stop)
    clock = asyncio.get_running_loop().time
    since_s = clock()
    trace.num_prompt_tokens = len(prompt)
    pick = Pick(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        num_logprobs=num_logprobs,
    )
    async with aclosing(session.next_tokens(prompt, pick, max_tokens)) as drawn:
        async for picked in drawn:
            token_id = picked.token_id
            trace.num_tokens += 1
            trace.total_ms = (clock() - since_s) * 1000
            trace.first_token_ms = trace.first_token_ms or trace.total_ms
            has_ended = token_id in kit.end_ids
            text = "" if has_ended else stops.push(detokenizer.push(token_id))
            if has_ended or stops.has_stopped or trace.num_tokens == max_tokens:
                text += stops.push(detokenizer.flush())
                reason: FinishReason = "stop" if has_ended or stops.has_stopped else "length"
                yield _token(kit, picked, text + stops.flush(), reason)
                return
            yield _token(kit, picked, text, None)


def _token(kit: ModelKit, picked: Picked, text: str, reason: FinishReason | None) -> Token:
    if picked.logprob is None or picked.token_id in kit.end_ids:
        return Token(text=text, token_id=picked.token_id, finish_reason=reason)
    return Token(
        text=text,
        token_id=picked.token_id,
        finish_reason=reason,
        logprob=picked.logprob,
        data=kit.token_bytes(picked.token_id),
        top=tuple(Likely(token_id=i, data=kit.token_bytes(i), logprob=value) for i, value in picked.top),
    )
