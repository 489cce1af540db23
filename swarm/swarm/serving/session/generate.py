"""One answer, token by token: session, sampling and text together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import numpy as np
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Sampler
from swarm_protocol.session_frames import SampledToken, TokenDraw

from swarm.serving.model.model_assets import ModelKit
from swarm.serving.sampling.sampling import Sampling
from swarm.serving.session.detokenizer import Detokenizer, StopFinder
from swarm.serving.session.session import Session
from swarm.serving.session.trace import Trace

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
    detokenizer, stops = Detokenizer(kit.decode_all), StopFinder(sampling.stop, sampling.stop_after)
    ends = end_ids(kit, sampling)
    clock = asyncio.get_running_loop().time
    since_s = clock()
    trace.num_prompt_tokens = len(prompt)
    pick = TokenDraw(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        num_logprobs=num_logprobs,
    )
    async with aclosing(session.next_tokens(prompt, pick, max_tokens)) as drawn:
        async for picked in drawn:
            token_id = picked.token_id
            trace.num_tokens += 1
            trace.total_ms = (clock() - since_s) * 1000
            trace.first_token_ms = trace.first_token_ms or trace.total_ms
            has_ended = token_id in ends
            text = "" if has_ended else await detokenizer.push(token_id)
            if trace.num_tokens > sampling.min_tokens:
                text = stops.push(text)
            if has_ended or stops.has_stopped or trace.num_tokens == max_tokens:
                text += stops.push(await detokenizer.flush())
                reason: FinishReason = "stop" if has_ended or stops.has_stopped else "length"
                yield await _token(kit, picked, text + stops.flush(), reason, is_end=has_ended)
                return
            yield await _token(kit, picked, text, None, is_end=False)


def end_ids(kit: ModelKit, sampling: Sampling) -> frozenset[int]:
    """The tokens that end an answer."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else kit.end_ids)


def sampler_for(kit: ModelKit, sampling: Sampling, prompt: Sequence[int]) -> Sampler | None:
    """What the last server has to know beyond a TokenDraw; None where that is nothing. Raises ConfigError."""
    ends = end_ids(kit, sampling)
    unknown = max([*ends - kit.end_ids, *(token_id for token_id, _ in sampling.logit_bias)], default=0)
    if unknown >= kit.shape.vocab_size:
        raise ConfigError(
            f"{kit.shape.name} has no token {unknown}", remedy=f"use token ids of 0 to {kit.shape.vocab_size - 1}"
        )
    if sampling.grammar is not None and not ends:
        raise ConfigError(f"{kit.shape.name} has no end token, which a grammar needs", remedy="give stop_token_ids")
    counts_prompt = sampling.repetition_penalty != 1.0
    sampler = Sampler(
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        prompt_ids=np.unique(np.asarray(prompt, dtype="<i4")).tobytes() if counts_prompt else b"",
        bias_ids=tuple(token_id for token_id, _ in sampling.logit_bias),
        bias_values=tuple(bias for _, bias in sampling.logit_bias),
        end_ids=tuple(sorted(ends)) if sampling.min_tokens or sampling.grammar else (),
        min_tokens=sampling.min_tokens,
        grammar=sampling.grammar,
    )
    return None if sampler == Sampler() else sampler


async def _token(kit: ModelKit, picked: SampledToken, text: str, reason: FinishReason | None, *, is_end: bool) -> Token:
    if picked.logprob is None or is_end:
        return Token(text=text, token_id=picked.token_id, finish_reason=reason)
    own, *others = await kit.token_bytes([picked.token_id, *(token_id for token_id, _ in picked.top)])
    return Token(
        text=text,
        token_id=picked.token_id,
        finish_reason=reason,
        logprob=picked.logprob,
        data=own,
        top=tuple(
            Likely(token_id=token_id, data=data, logprob=value)
            for (token_id, value), data in zip(picked.top, others, strict=True)
        ),
    )
