"""Defines a request for a generation: its values and their checks, and the token ids of its prompt."""

from __future__ import annotations

import inspect
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar

from swarm.router.routing import NeverRoom
from swarm.serving.sampling.sampling import OWN_DEFAULTS, Sampling, check_kind
from swarm.serving.tokenizer.model_assets import Message, ModelAssets

A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt: text or token ids in `prompt`, or `messages` for the chat template, which also gets `tools` and
    `template_kwargs`.

    Raises ConfigError for a value that is neither.
    """

    prompt: str | Sequence[int] | None
    messages: Sequence[Message] = ()
    tools: Sequence[Message] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.prompt is None or isinstance(self.prompt, str) or _are(Integral, self.prompt)):
            raise ConfigError(
                f"a prompt is text or token ids, and not {self.prompt!r:.80}",
                remedy='give prompt="…" or a list of ints; for several prompts, call it once for each',
            )
        for name, given in (("messages", self.messages), ("tools", self.tools)):
            if not _are(Mapping, given):
                raise ConfigError(
                    f"{name} are a list of dicts, and not {given!r:.80}", remedy="give them as OpenAI's API has them"
                )
        if without := [number for number, message in enumerate(self.messages) if "role" not in message]:
            raise ConfigError(
                f"message {without[0]} has no role",
                remedy='give each as {"role": "user", "content": "…"}',
                field="messages",
            )
        if not (isinstance(self.template_kwargs, Mapping) and _are(str, [*self.template_kwargs])):
            raise ConfigError(
                f"template_kwargs are a dict with names, and not {self.template_kwargs!r:.80}",
                remedy="give what the model's chat template knows, such as {'enable_thinking': False}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request. Without `max_tokens` the answer may fill the model's context. Fields of `sampling` that were
    `left_out` get the model's own defaults, if it has any. Requests that echo the same prompt may share `scores`, the
    prompt's scores by revision, which the first request then computes for all. Raises ConfigError for invalid
    values."""

    model: str
    prompt: Prompt
    max_tokens: int | None
    sampling: Sampling
    num_logprobs: int | None
    stream: bool
    echo: bool = False
    left_out: Collection[str] = ()
    timeout_s: float | None = None
    scores: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise ConfigError(f"model is {self.model!r:.80}", remedy="give the model's name as its servers tell it")
        if self.max_tokens is not None:
            check_kind(self.max_tokens, "max_tokens", Integral)
            least = 0 if self.echo else 1
            if self.max_tokens < least:
                remedy = "ask for 1 token or more, or for none with echo"
                raise ConfigError(f"max_tokens is {self.max_tokens}", remedy=remedy)
        _check_num_logprobs(self.num_logprobs)

    def drawn_by(self, own: Mapping[str, Any]) -> Sampling:
        """Return the sampling with a model's `own` defaults for what was left out."""
        return replace(self.sampling, **{name: value for name, value in own.items() if name in self.left_out})


def _check_num_logprobs(num_logprobs: int | None) -> None:
    if num_logprobs is None:
        return
    check_kind(num_logprobs, "num_logprobs", Integral)
    if not 0 <= num_logprobs <= limits.MAX_LOGPROBS:
        raise ConfigError(f"num_logprobs is {num_logprobs}", remedy=f"use 0 to {limits.MAX_LOGPROBS}")


def _are(kind: type[Any], values: object) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str | bytes)
        and all(isinstance(value, kind) for value in values)
    )


def _prompt(
    prompt: str | Sequence[int] | None,
    messages: Sequence[Message] | None,
    tools: Sequence[Message] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> Prompt:
    if (prompt is None) == (messages is None):
        raise ConfigError("a generation needs either a prompt or messages", remedy="give one of the two")
    if messages is not None and not messages:
        raise ConfigError("there are no messages", remedy="give one or more")
    return Prompt(prompt=prompt, messages=messages or (), tools=tools or (), template_kwargs=template_kwargs or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of `generate` for the draw of an answer's tokens and for its end. `Sampling` explains each field.

    Those that are None by default, from `temperature` to `repetition_penalty`, have the values of the model's
    generation_config.json; without these each token is the likeliest one. `logit_bias` is by token id. Without a
    `seed`, each generation draws one. `grammar` or `json_schema` restrict the text. With `num_logprobs` (0 to
    MAX_LOGPROBS), each token has its log probability and those of that many likeliest tokens. With `echo`, the prompt's
    tokens come before the answer's, with `is_prompt` set, and `max_tokens` may be 0; without `num_logprobs` the whole
    prompt is one Token. The whole answer may take `timeout_s`. Raises ConfigError for invalid values.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None
    json_schema: Mapping[str, Any] | None = None
    num_logprobs: int | None = None
    echo: bool = False
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        self.sampling()
        _check_num_logprobs(self.num_logprobs)
        if self.timeout_s is not None:
            check_kind(self.timeout_s, "timeout_s", Real)
            if not self.timeout_s > 0:
                raise ConfigError(f"timeout_s is {self.timeout_s}", remedy="use a number of seconds above 0")

    def sampling(self) -> Sampling:
        """Return the values in the form for servers and sessions, with a seed."""
        not_here = {"json_schema", "num_logprobs", "echo", "timeout_s", *left_out(self)}
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in not_here}
        given |= {
            "logit_bias": self._biases(),
            "seed": secrets.randbits(63) if self.seed is None else self.seed,
            "stop": self._stops(),
            "stop_token_ids": self._token_ids(),
            "grammar": self._grammar(),
        }
        return Sampling(**given)

    def _stops(self) -> tuple[str, ...]:
        if not (isinstance(self.stop, str) or _are(str, self.stop)):
            raise ConfigError(f"stop is {self.stop!r:.80}", remedy="use a string or a list of strings")
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _token_ids(self) -> tuple[int, ...]:
        if not _are(Integral, self.stop_token_ids):
            raise ConfigError(f"stop_token_ids is {self.stop_token_ids!r:.80}", remedy="use a list of ints")
        return tuple(self.stop_token_ids)

    def _biases(self) -> tuple[tuple[int, float], ...]:
        biases = {} if self.logit_bias is None else self.logit_bias
        if not (isinstance(biases, Mapping) and _are(Integral, [*biases]) and _are(Real, [*biases.values()])):
            raise ConfigError(f"logit_bias is {self.logit_bias!r:.80}", remedy="use a dict of token ids and numbers")
        return tuple(biases.items())

    def _grammar(self) -> Grammar | None:
        if self.grammar is not None and self.json_schema is not None:
            raise ConfigError("an answer has either a grammar or a json_schema", remedy="give one of the two")
        if not isinstance(self.grammar, Grammar | None):
            raise ConfigError(f"grammar is {self.grammar!r:.80}", remedy='use Grammar(kind="lark", text="…")')
        if self.json_schema is None:
            return self.grammar
        if not isinstance(self.json_schema, Mapping):
            raise ConfigError(f"json_schema is {self.json_schema!r:.80}", remedy="use the schema as a dict")
        return schema_grammar(self.json_schema)


def left_out(options: object) -> list[str]:
    """Return the names of the sampling options that are None: their values are the model's own defaults."""
    return [name for name in OWN_DEFAULTS if getattr(options, name) is None]


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of the JSON texts that a JSON schema allows. Raises ConfigError for one that is too large."""
    try:
        return Grammar(kind="json_schema", text=json.dumps(schema))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"the JSON schema cannot be used: {error}", remedy="use a smaller or another one") from None


class TextClient(ABC, Generic[A]):
    """A client with `generate`; `A` is the type of its answers."""

    def generate(
        self,
        *,
        model: str,
        prompt: str | Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Message] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stream: bool = True,
        **sampled: Any,
    ) -> A:
        """Continue `prompt` (text or token ids), or answer `messages` by the model's chat template, which also gets
        `tools`.

        `model` is a name, or NAME@REVISION for one of several revisions that are served under it; `template_kwargs` go
        to the chat template. Without `max_tokens`, the answer ends at an end token or at the end of the model's
        context. `sampling` holds the options of the draw; its fields can also be given as keywords
        (`temperature=0.7, seed=1`), which take precedence. Without either, the model's own defaults count.

        Iterating yields a Token for each step, the last one with its finish reason; with `stream=False` it yields one
        Token with the whole text. If no server has room for a longer answer, the last Token has the reason "length" and
        the `token_id` -1. If a server dies while others hold its blocks, the answer only pauses, and no token
        changes. The call raises ConfigError for invalid values and TypeError for an unknown keyword. Iterating raises
        ConfigError for an unknown model or a prompt over the context or over every server's cache, NoChain (a
        SessionError) if blocks are missing or were lost, its subclass NoRoom if their servers are full, PeerError if
        nobody answers, and SessionError for an answer that takes over `timeout_s`.
        """
        if not isinstance(sampling, SamplingParams | None):
            raise ConfigError(f"sampling is {sampling!r:.80}", remedy="use SamplingParams(temperature=0.7, …)")
        if unknown := next((name for name in sampled if name not in _SAMPLED), ""):
            raise TypeError(f"generate() has no keyword {unknown!r}: {_nearest(unknown)}")
        params = replace(sampling or SamplingParams(), **sampled)
        request = GenerationRequest(
            model=model,
            prompt=_prompt(prompt, messages, tools, template_kwargs),
            max_tokens=max_tokens,
            sampling=params.sampling(),
            num_logprobs=params.num_logprobs,
            stream=stream,
            echo=params.echo,
            left_out=left_out(params),
            timeout_s=params.timeout_s,
        )
        return self.answer(request)

    @abstractmethod
    def answer(self, request: GenerationRequest) -> A:
        """Answer a request as `generate` does."""


_SAMPLED = tuple(each.name for each in fields(SamplingParams))
_KEYWORDS = tuple(
    name
    for name, each in inspect.signature(TextClient.generate).parameters.items()
    if each.kind is inspect.Parameter.KEYWORD_ONLY
)


def _nearest(unknown: str) -> str:
    """Return a hint for an unknown keyword of `generate`: the nearest keyword, or all if none is near."""
    known = (*_KEYWORDS, *_SAMPLED)
    nearest = get_close_matches(unknown, known, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"it takes {', '.join(known)}"


async def encode(assets: ModelAssets, prompt: Prompt) -> list[int]:
    """Return the prompt's token ids.

    Raises ConfigError, also if the tokenizer exceeds its time or memory, and the errors of `ModelAssets`.
    """
    if prompt.prompt is None:
        token_ids = await assets.encode_chat(prompt.messages, prompt.tools, prompt.template_kwargs)
    elif isinstance(prompt.prompt, str):
        token_ids = await assets.encode(prompt.prompt)
    else:
        return checked(assets, prompt.prompt)
    if not all(0 <= token_id < assets.shape.vocab_size for token_id in token_ids):
        raise ConfigError(
            f"the tokenizer of {assets.shape.name} gives tokens for this text that the model does not know",
            remedy="use other words or another model",
            field="prompt",
        )
    return token_ids


def check_prompt_ids(token_ids: object) -> list[int]:
    """Return the ids as a list. Raises ConfigError unless they are whole numbers that a tensor can hold."""
    if isinstance(token_ids, Iterable) and not isinstance(token_ids, str | bytes):
        ids = list(token_ids)
        if all(isinstance(each, Integral) and abs(int(each)) < 2**63 for each in ids):
            return ids
    raise ConfigError(f"{token_ids!r:.80} is no list of token ids", remedy="use a list of ints")


def checked(assets: ModelAssets, token_ids: Sequence[int], *, field: str = "prompt") -> list[int]:
    """Return the ids as a list. Raises ConfigError, which names `field`, unless the model knows all of them."""
    token_ids = check_prompt_ids(token_ids)
    if not all(0 <= token_id < assets.shape.vocab_size for token_id in token_ids):
        raise ConfigError(
            "these are token ids that the model does not know",
            remedy=f"use 0 to {assets.shape.vocab_size - 1}",
            field=field,
        )
    return token_ids


class ContextExceeded(ConfigError):
    """A text, or a prompt with its answer, has more tokens than the model's context, or than any server computes in one
    call or has in its cache. Clients may shorten it."""


def check_fits(assets: ModelAssets, num_tokens: int) -> None:
    """Check the length of a text. Raises ConfigError for an empty text, and for one over the model's context."""
    if not num_tokens:
        raise ConfigError("the text is empty", remedy="give some text", field="prompt")
    if num_tokens > assets.context_tokens:
        raise ContextExceeded(
            f"{num_tokens} tokens are {num_tokens - assets.context_tokens} over the context of {assets.shape.name}",
            remedy="shorten the text",
            field="prompt",
        )


def caches_too_small(error: NeverRoom) -> ContextExceeded:
    """Return the error of a request for which no server of some blocks ever has room."""
    start, end = error.missing[0]
    return ContextExceeded(
        f"the cache of each server of blocks {start}:{end} is too small for the prompt and its answer",
        remedy="shorten the prompt or ask for fewer tokens",
        field="prompt",
    )


def room_for(assets: ModelAssets, num_prompt_tokens: int, max_tokens: int | None, *, min_tokens: int = 0) -> int:
    """Return the maximum tokens of the answer: `max_tokens`, or if that is None the rest of the context.

    Raises ConfigError for an empty prompt, for one that leaves too little room for the answer (the message says by how
    much), and if `min_tokens` exceed the maximum.
    """
    if not num_prompt_tokens:
        raise ConfigError("the prompt is empty", remedy="give some text to continue", field="prompt")
    room = assets.context_tokens - num_prompt_tokens
    wanted = max(1, room) if max_tokens is None else max_tokens
    if wanted > room:
        tokens = "1 token" if num_prompt_tokens == 1 else f"{num_prompt_tokens} tokens"
        shorter = ["shorten the prompt"] if room < num_prompt_tokens else []
        fewer = [f"ask for {room} at most"] if room > 0 else []
        raise ContextExceeded(
            f"a prompt of {tokens} with an answer of {wanted} is {wanted - room} over the context of "
            f"{assets.context_tokens} tokens of {assets.shape.name}",
            remedy=" or ".join([*shorter, *fewer]),
            field="max_tokens" if room > 0 else "prompt",
        )
    if wanted < min_tokens:
        raise ConfigError(
            f"min_tokens is {min_tokens}, and the answer may have {wanted} tokens",
            remedy="ask for as many with max_tokens",
            field="min_tokens",
        )
    return wanted
