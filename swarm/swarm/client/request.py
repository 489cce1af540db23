"""What a generation is asked for, as one value, and the names by which people ask for it. No state."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

from swarm_protocol.errors import ConfigError

from swarm.serving.model.kit import Message
from swarm.serving.sampling import Pick, Sampling

DEFAULT_MAX_TOKENS = 512
"""Of an answer that was asked for without a number; fewer where the model's context ends before."""

A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, text or token ids; or else messages, for the chat template, which sees `tools`.

    Raises ConfigError for what is neither.
    """

    prompt: str | Sequence[int] | None
    messages: Sequence[Message] = ()
    tools: Sequence[Message] = ()

    def __post_init__(self) -> None:
        if not (self.prompt is None or isinstance(self.prompt, str) or _are(Integral, self.prompt)):
            raise ConfigError(
                f"a prompt is text or token ids, and not {self.prompt!r:.80}",
                remedy='give prompt="…" or a list of ints',
            )
        for name, given in (("messages", self.messages), ("tools", self.tools)):
            if not _are(Mapping, given):
                raise ConfigError(
                    f"{name} are a list of dicts, and not {given!r:.80}", remedy="give them as OpenAI's API has them"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`max_tokens` None: as many as are usual and fit. Raises ConfigError for values without meaning."""

    model: str
    question: Question
    max_tokens: int | None
    sampling: Sampling
    num_logprobs: int | None
    stream: bool

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}", remedy="ask for 1 token or more")
        Pick(sampling=self.sampling, index=0, num_logprobs=self.num_logprobs)


def _are(kind: type[Any], values: object) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str | bytes)
        and all(isinstance(v, kind) for v in values)
    )


def _check(kind: type[Any], named: str, **values: object) -> None:
    """None is for what was not said."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise ConfigError(f"{name} is {value!r:.80}", remedy=f"use {named}")


class Asked(ABC, Generic[A]):
    """Whom one asks by `generate`; `A` is how answers come."""

    def generate(  # noqa: PLR0913 the names of every other text API
        self,
        *,
        model: str,
        prompt: str | Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Message] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        num_logprobs: int | None = None,
        stream: bool = True,
    ) -> A:
        """Continue `prompt` (text or token ids), or answer `messages` by the model's chat template, which sees `tools`.

        Without `max_tokens` the answer has up to DEFAULT_MAX_TOKENS, or what is left of the model's context.
        With `num_logprobs` each token tells its probability and those of so many of the likeliest (0 to MAX_LOGPROBS).

        Iterating yields a Token for each step, the last with its finish reason; with `stream=False` one Token with the
        whole text. A server's death costs a pause, never a token. Raises ConfigError for values without meaning, here;
        and when iterated ConfigError for an unknown model or a prompt over the context, SessionError when blocks are
        missing or were lost, PeerError when nobody answers.
        """
        if (prompt is None) == (messages is None):
            raise ConfigError("a generation needs either a prompt or messages", remedy="give one of the two")
        if messages is not None and not messages:
            raise ConfigError("there are no messages", remedy="give one or more")
        _check(Integral, "a whole number", max_tokens=max_tokens, top_k=top_k, seed=seed, num_logprobs=num_logprobs)
        _check(Real, "a number", temperature=temperature, top_p=top_p)
        if not (isinstance(stop, str) or _are(str, stop)):
            raise ConfigError(f"stop is {stop!r:.80}", remedy="use a str, or a list of some")
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=secrets.randbits(63) if seed is None else seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        request = Request(
            model=model,
            question=Question(prompt=prompt, messages=messages or (), tools=tools or ()),
            max_tokens=max_tokens,
            sampling=sampling,
            num_logprobs=num_logprobs,
            stream=stream,
        )
        return self.answer(request)

    @abstractmethod
    def answer(self, request: Request) -> A:
        """As `generate`."""
