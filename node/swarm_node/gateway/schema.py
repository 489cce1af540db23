"""What a client may ask for, bounded field by field; what only chats have is `chat_schema`'s.

Unknown fields are ignored, as OpenAI does. Fields that are known but not offered are refused unless they hold their
neutral value: to ignore `suffix` or `logit_bias` silently would be to answer another question.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from swarm.serving.sampling import Sampling

from swarm_node.gateway import bounds

INT64 = 2**63
Neutral = Mapping[str, tuple[Any, ...]]


def or_default(default: Any) -> BeforeValidator:
    """OpenAI's clients send null for 'use the default'."""
    return BeforeValidator(lambda value: default if value is None else value)


def unsupported(name: str, hint: str = "leave it out") -> PydanticCustomError:
    """A field that is known, and not offered."""
    return PydanticCustomError(
        "unsupported", "'{name}' is not supported by this gateway: {hint}", {"name": name, "hint": hint}
    )


def unfit(name: str, why: str) -> PydanticCustomError:
    """A field that does not go with another."""
    return PydanticCustomError("unfit", "{name}: {why}", {"name": name, "why": why})


Text = Annotated[str, Field(max_length=bounds.MAX_PROMPT_CHARS)]
TokenIds = Annotated[
    list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]], Field(min_length=1, max_length=bounds.MAX_NEW_TOKENS)
]
MaxTokens = Annotated[int, Field(ge=1, le=bounds.MAX_NEW_TOKENS)]
StopText = Annotated[str, Field(min_length=1, max_length=bounds.MAX_STOP_CHARS)]


class StreamOptions(BaseModel):
    include_usage: Annotated[bool, or_default(False)] = False


class SamplingRequest(BaseModel):
    """The fields that both endpoints share."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    neutral: ClassVar[Neutral] = {
        "presence_penalty": (0, 0.0),
        "frequency_penalty": (0, 0.0),
        "logit_bias": ({},),
    }

    model: Annotated[str, Field(min_length=1, max_length=bounds.MAX_MODEL_NAME_CHARS)]
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, or_default(1.0), Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, or_default(1.0), Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, or_default(0), Field(ge=0, le=bounds.MAX_TOP_K)] = 0
    n: Annotated[int, or_default(1), Field(ge=1, le=bounds.MAX_CHOICES)] = 1
    seed: Annotated[int, Field(gt=-INT64, lt=INT64)] | None = None
    stop: Annotated[list[StopText], Field(max_length=bounds.MAX_STOPS)] = Field(default_factory=list)
    stream: Annotated[bool, or_default(False)] = False
    stream_options: Annotated[StreamOptions, or_default({})] = Field(default_factory=StreamOptions)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_offered(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, allowed in cls.neutral.items():
                if data.get(name) is not None and data[name] not in allowed:
                    raise unsupported(name)
        return data

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_or_many(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @property
    def include_usage(self) -> bool:
        return self.stream and self.stream_options.include_usage

    def samplings(self) -> Sequence[Sampling]:
        """One for each of the `n` answers: the first has the request's own seed, the others' follow from it."""
        return [
            Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=secrets.randbits(63) if self.seed is None else _derived(self.seed, index),
                stop=tuple(self.stop),
            )
            for index in range(self.n)
        ]


def _derived(seed: int, index: int) -> int:
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"choice {seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class CompletionRequest(SamplingRequest):
    """`prompt` is always a list here: of texts, or of lists of token ids."""

    neutral: ClassVar[Neutral] = {**SamplingRequest.neutral, "echo": (False,), "suffix": ("",)}

    prompt: Annotated[list[Text | TokenIds], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=bounds.MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt_or_many(cls, value: Any) -> Any:
        is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
        return [value] if is_one else value

    @field_validator("prompt", mode="after")
    @classmethod
    def _bounded(cls, value: list[str | list[int]]) -> list[str | list[int]]:
        if len(value) > bounds.MAX_CHOICES:
            raise unfit("prompt", f"a request may have {bounds.MAX_CHOICES} prompts at most")
        return value

    @model_validator(mode="after")
    def _few_choices(self) -> CompletionRequest:
        if self.best_of not in {None, self.n}:
            raise unsupported("best_of", "leave it out, or let it be equal to n")
        if len(self.prompt) * self.n > bounds.MAX_CHOICES:
            raise unfit("n", f"prompts times n may be {bounds.MAX_CHOICES} at most")
        return self

    @property
    def num_new_tokens(self) -> int:
        return self.max_tokens or bounds.DEFAULT_COMPLETION_TOKENS
