"""What a client may ask for, bounded field by field.

Unknown fields are ignored, as OpenAI does. Fields that are known but not offered yet are refused unless they hold
their neutral value: to ignore `n=3` or `logprobs` silently would be to answer another question.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from swarm_node.gateway import bounds

INT64 = 2**63


def _or(default: Any) -> BeforeValidator:
    """OpenAI's clients send null for 'use the default'."""
    return BeforeValidator(lambda value: default if value is None else value)


Text = Annotated[str, Field(max_length=bounds.MAX_PROMPT_CHARS)]
MaxTokens = Annotated[int, Field(ge=1, le=bounds.MAX_NEW_TOKENS)]
StopText = Annotated[str, Field(min_length=1, max_length=bounds.MAX_STOP_CHARS)]


class StreamOptions(BaseModel):
    include_usage: Annotated[bool, _or(False)] = False


class SamplingRequest(BaseModel):
    """The fields that both endpoints share."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "presence_penalty": (0, 0.0),
        "frequency_penalty": (0, 0.0),
        "logit_bias": ({},),
    }

    model: Annotated[str, Field(min_length=1, max_length=bounds.MAX_MODEL_NAME_CHARS)]
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, _or(1.0), Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, _or(1.0), Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, _or(0), Field(ge=0, le=bounds.MAX_TOP_K)] = 0
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Annotated[list[StopText], Field(max_length=bounds.MAX_STOPS)] = Field(default_factory=list)
    stream: Annotated[bool, _or(False)] = False
    stream_options: Annotated[StreamOptions, _or({})] = Field(default_factory=StreamOptions)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_offered(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, allowed in cls.neutral.items():
                if data.get(name) is not None and data[name] not in allowed:
                    raise PydanticCustomError(
                        "unsupported", "'{name}' is not supported by this gateway yet: leave it out", {"name": name}
                    )
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


class CompletionRequest(SamplingRequest):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingRequest.neutral,
        "best_of": (1,),
        "logprobs": (),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: Text

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], str):
                return value[0]
            raise PydanticCustomError(
                "unsupported",
                "'{name}' must be one text: several, and token ids, are not supported by this gateway yet",
                {"name": "prompt"},
            )
        return value

    @property
    def num_new_tokens(self) -> int:
        return self.max_tokens or bounds.DEFAULT_COMPLETION_TOKENS


class TextPart(BaseModel):
    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=bounds.MAX_MESSAGE_PARTS)]

    def flat(self) -> dict[str, str]:
        """As chat templates expect it: plain text, and 'developer', OpenAI's newer word, as 'system'."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(SamplingRequest):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingRequest.neutral,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=bounds.MAX_CHAT_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None

    @property
    def num_new_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or bounds.DEFAULT_CHAT_TOKENS
