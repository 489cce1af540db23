"""Generates one answer token by token, from session, sampling and text.

Text is shown as early as possible, but never half a character and never past a stop string. A client hands out a
`Generation`, the running answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from swarm_protocol.checks import shared_fields
from swarm_protocol.errors import ConfigError, SessionError
from swarm_protocol.sampler import Sampler
from swarm_protocol.session_frames import SampledToken, TokenDraw

from swarm.serving.sampling.sampling import Sampling
from swarm.serving.session.trace import Trace
from swarm.serving.tokenizer.model_assets import ModelAssets

MAX_HELD_TOKENS = 16
"""Maximum tokens that are held back until they form a character. A character has at most four bytes, and so four
tokens. Bytes that form no character by then are shown as U+FFFD."""


Decode: TypeAlias = Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[str]]]


async def last_text(decode: Decode, token_ids: Sequence[int]) -> Sequence[int]:
    """Return the last ids, as few as form whole characters; no ids if more than MAX_HELD_TOKENS would be needed."""
    ends = [token_ids[-num:] for num in range(1, min(len(token_ids), MAX_HELD_TOKENS) + 1)]
    texts = await decode(ends)
    return next((ids for ids, text in zip(ends, texts, strict=True) if text and "\ufffd" not in text), ())


class Detokenizer:
    """Turns token ids into text. The joined pieces from `push` and `flush` are the decoded text of all ids.

    This does not hold for a tokenizer whose later tokens change earlier text other than an unfinished character, nor
    for more than MAX_HELD_TOKENS invalid tokens in a row. `before` are the last tokens of the text that is continued.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        # ids before `_shown` have been shown, and are decoded again with each new id, since a tokenizer may write a
        # word differently at the start of a text
        self._ids = list(before)
        self._shown = len(before)

    async def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = await self._pending()
        if text.endswith("\ufffd") and len(self._ids) - self._shown < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    async def flush(self) -> str:
        return self._show(await self._pending())

    async def _pending(self) -> str:
        before, text = await self._decode([self._ids[: self._shown], self._ids])
        return text[len(before) :]

    def _show(self, text: str) -> str:
        if text:
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
        elif len(self._ids) - self._shown >= MAX_HELD_TOKENS:
            del self._ids[self._shown :]  # tokens without text, such as special ones
        return text


class StopFinder:
    """Holds back text that may be the beginning of a stop string. A stop string in `shown_stops` is shown, others are
    not."""

    def __init__(self, stops: Sequence[str], shown_stops: Sequence[str] = ()) -> None:
        self.has_stopped = False
        self._num_shown = dict.fromkeys(stops, 0) | {stop: len(stop) for stop in shown_stops}
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that can be shown. After a stop string, `has_stopped` is set and the rest is dropped."""
        if self.has_stopped:
            return ""
        self._held += text
        found = [(at, num) for stop, num in self._num_shown.items() if (at := self._held.find(stop)) >= 0]
        if found:
            self.has_stopped = True
            shown, self._held = self._held[: sum(min(found))], ""
            return shown
        num_held = max((_overlap(self._held, stop) for stop in self._num_shown), default=0)
        cut = len(self._held) - num_held
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


FinishReason = Literal["stop", "length"]

NO_TOKEN = -1
"""The `token_id` of the end of an answer for which no server has room any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyToken:
    """A token that could have been drawn, with its log probability. `data` are its bytes, which may end within a
    character."""

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One step of an answer. `text` may be empty while a character or a stop string is incomplete.

    If probabilities were asked for, `data` are the token's bytes, `logprob` is its log probability, and `top` has the
    likeliest tokens. An end token has none of them, since it is no part of the answer, except if the prompt is echoed.
    The last one may be NO_TOKEN, which is no token. With `is_prompt` it is a token of an echoed prompt, the last of
    which has the prompt's text; the first one has no log probability.
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    data: bytes = b""
    top: tuple[LikelyToken, ...] = ()
    is_prompt: bool = False

    @property
    def is_drawn(self) -> bool:
        """Return whether this is a token of the answer."""
        return not self.is_prompt and self.token_id != NO_TOKEN


class TokenSource(Protocol):
    """Draws the tokens of an answer. A session is one; another knows its only token already."""

    def next_tokens(
        self, tokens: Sequence[int], draw: TokenDraw, num_tokens: int
    ) -> AsyncGenerator[SampledToken, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """Says how an answer is shown. With `num_logprobs`, tokens have log probabilities; with `scores_end`, an end token
    has one, too. An answer that `continues` its prompt's text may begin with a space, which some tokenizers leave out
    at the start of a text."""

    num_logprobs: int | None = None
    scores_end: bool = False
    continues: bool = False


async def generate(
    source: TokenSource,
    assets: ModelAssets,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    trace: Trace,
    *,
    form: AnswerForm,
) -> AsyncGenerator[Token, None]:
    """Yield at most `max_tokens` tokens, the last one with its finish reason. A session must be open. If it cannot grow
    any more, NO_TOKEN follows the last one."""
    before = await last_text(assets.decode_all, prompt) if form.continues else ()
    detokenizer, stops = Detokenizer(assets.decode_all, before), StopFinder(sampling.stop, sampling.stop_after)
    ends = end_ids(assets, sampling)
    clock = asyncio.get_running_loop().time
    since_s = clock()
    trace.num_prompt_tokens = len(prompt)
    pick = TokenDraw(num_logprobs=form.num_logprobs, **shared_fields(sampling, TokenDraw))
    async with aclosing(source.next_tokens(prompt, pick, max_tokens)) as drawn:
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
                is_end = has_ended and not form.scores_end
                yield await _token(assets, picked, text + stops.flush(), reason, is_end=is_end)
                return
            yield await _token(assets, picked, text, None, is_end=False)
    text = stops.push(await detokenizer.flush())
    reason = "stop" if stops.has_stopped else "length"
    yield Token(text=text + stops.flush(), token_id=NO_TOKEN, finish_reason=reason)


def end_ids(assets: ModelAssets, sampling: Sampling) -> frozenset[int]:
    """Return the tokens that end an answer."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else assets.end_ids)


def sampler_for(assets: ModelAssets, sampling: Sampling, prompt: Sequence[int]) -> Sampler | None:
    """Return the settings that the last server needs beyond a TokenDraw, or None if it needs none. Raises
    ConfigError."""
    ends = end_ids(assets, sampling)
    biased = [token_id for token_id, _ in sampling.logit_bias]
    for field, token_ids in (("stop_token_ids", ends - assets.end_ids), ("logit_bias", biased)):
        if (unknown := max(token_ids, default=0)) >= assets.shape.vocab_size:
            raise ConfigError(
                f"{assets.shape.name} has no token {unknown}",
                remedy=f"use token ids of 0 to {assets.shape.vocab_size - 1}",
                field=field,
            )
    if sampling.grammar is not None and not ends:
        raise ConfigError(
            f"{assets.shape.name} has no end token, which a grammar needs",
            remedy="give stop_token_ids",
            field="grammar",
        )
    counts_prompt = sampling.repetition_penalty != 1.0
    sampler = Sampler(
        prompt_ids=np.unique(np.asarray(prompt, dtype="<i4")).tobytes() if counts_prompt else b"",
        bias_ids=tuple(token_id for token_id, _ in sampling.logit_bias),
        bias_values=tuple(bias for _, bias in sampling.logit_bias),
        end_ids=tuple(sorted(ends)) if sampling.min_tokens or sampling.grammar else (),
        **shared_fields(sampling, Sampler),
    )
    return None if sampler == Sampler() else sampler


async def _token(
    assets: ModelAssets, picked: SampledToken, text: str, reason: FinishReason | None, *, is_end: bool
) -> Token:
    if picked.logprob is None or is_end:
        return Token(text=text, token_id=picked.token_id, finish_reason=reason)
    own, *others = await assets.token_bytes([picked.token_id, *(token_id for token_id, _ in picked.top)])
    return Token(
        text=text,
        token_id=picked.token_id,
        finish_reason=reason,
        logprob=picked.logprob,
        data=own,
        top=tuple(
            LikelyToken(token_id=token_id, data=data, logprob=value)
            for (token_id, value), data in zip(picked.top, others, strict=True)
        ),
    )


class Generation:
    """A running answer. It starts when the first token is asked for; `aclose` frees the chain at any time.

    Without `stream`, it is one token with the whole text. It may take `timeout_s`.
    """

    def __init__(
        self,
        start: Callable[[Trace], AsyncGenerator[Token, None]],
        model: str,
        *,
        stream: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        self._trace = Trace(model=model)
        tokens = start(self._trace) if stream else _joined(start(self._trace))
        self._tokens = tokens if timeout_s is None else _within(timeout_s, tokens)

    def __aiter__(self) -> AsyncIterator[Token]:
        return self._tokens

    async def aclose(self) -> None:
        await self._tokens.aclose()

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt, or 0 until the first token has arrived."""
        return self._trace.num_prompt_tokens

    def trace(self) -> dict[str, Any]:
        """Return the trace so far: `hops` (servers, spans, ms), `replays`, `failover_ms`, token counts."""
        return self._trace.to_dict()


async def _joined(tokens: AsyncGenerator[Token, None]) -> AsyncGenerator[Token, None]:
    """Yield all tokens as one, with the whole text."""
    async with aclosing(tokens):
        all_tokens = [token async for token in tokens]
    last = all_tokens[-1]
    text = "".join(token.text for token in all_tokens)
    yield Token(text=text, token_id=last.token_id, finish_reason=last.finish_reason)


async def _within(timeout_s: float, tokens: AsyncGenerator[Token, None]) -> AsyncGenerator[Token, None]:
    """Yield the tokens. Raises SessionError if the last one has not come `timeout_s` after the first was asked for."""
    until_s = asyncio.get_running_loop().time() + timeout_s
    async with aclosing(tokens):
        while True:
            try:
                # for each token, since the caller may ask for each in another task
                async with asyncio.timeout_at(until_s):
                    token = await anext(tokens, None)
            except TimeoutError:
                raise SessionError(
                    f"the answer took over {timeout_s:g} s", remedy="allow more with timeout_s, or ask for fewer tokens"
                ) from None
            if token is None:
                return
            yield token
