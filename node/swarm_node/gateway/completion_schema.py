"""Defines the body of a completion request: what it has beyond the fields that say how tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator
from swarm.client.request import Prompt

from swarm_node.gateway import http_limits
from swarm_node.gateway.request_schema import (
    WHOLE,
    Neutral,
    OrDefault,
    SamplingRequest,
    Text,
    TokenIds,
    check_one_or_many,
    unfit,
)


def one_prompt_or_many(value: Any) -> Any:
    """Return a list of one for a single prompt (text or token ids), which OpenAI's API accepts without a list."""
    check_one_or_many(value)
    is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int | float))
    return [value] if is_one else value


ManyPrompts = Annotated[list[Text | TokenIds], Field(min_length=1, max_length=http_limits.MAX_CHOICES, fail_fast=True)]
Prompts = Annotated[
    ManyPrompts, BeforeValidator(one_prompt_or_many, json_schema_input_type=Text | TokenIds | ManyPrompts)
]
"""One or several prompts, each a text or token ids."""


class CompletionRequest(SamplingRequest):
    """The body of a completion request. After validation `prompt` is always a list."""

    tool_names: ClassVar[Sequence[str]] = ()
    neutral: ClassVar[Neutral] = {
        **SamplingRequest.neutral,
        "add_special_tokens": (True,),
        "suffix": ("",),
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=http_limits.MAX_NEW_TOKENS), WHOLE] | None = None
    logprobs: Annotated[int, Field(ge=0, le=http_limits.MAX_COMPLETION_LOGPROBS), WHOLE] | None = None
    echo: Annotated[bool, OrDefault(False)] = False

    @model_validator(mode="after")
    def _few_choices(self) -> CompletionRequest:
        if self.num_choices > http_limits.MAX_CHOICES:
            raise unfit("n", f"the number of prompts times n must be at most {http_limits.MAX_CHOICES}")
        return self

    @model_validator(mode="after")
    def _something_to_answer(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise unfit("max_tokens", "it must be at least 1 without echo")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        return [Prompt(prompt=prompt) for prompt in self.prompt]

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_new_tokens(self) -> int:
        return http_limits.DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
