"""What goes out: OpenAI's response objects, whole and in chunks, for both endpoints. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

Json = dict[str, Any]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Shape(Protocol):
    """One endpoint's objects for one request."""

    @property
    def id(self) -> str: ...

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Json: ...

    def first_chunks(self) -> list[Json]: ...

    def text_chunk(self, text: str) -> Json: ...

    def last_chunk(self, finish_reason: str) -> Json: ...

    def usage_chunk(self, usage: Usage) -> Json: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    id: str
    model: str
    created: int

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Json:
        return {**self._chunk(text, finish_reason), "usage": usage.as_json()}

    def first_chunks(self) -> list[Json]:
        return []

    def text_chunk(self, text: str) -> Json:
        return self._chunk(text, None)

    def last_chunk(self, finish_reason: str) -> Json:
        return self._chunk("", finish_reason)

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._object([]), "usage": usage.as_json()}

    def _chunk(self, text: str, finish_reason: str | None) -> Json:
        return self._object([{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}])

    def _object(self, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    id: str
    model: str
    created: int

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {**self._object("chat.completion", [choice]), "usage": usage.as_json()}

    def first_chunks(self) -> list[Json]:
        return [self._chunk({"role": "assistant", "content": ""}, None)]

    def text_chunk(self, text: str) -> Json:
        return self._chunk({"content": text}, None)

    def last_chunk(self, finish_reason: str) -> Json:
        return self._chunk({}, finish_reason)

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._object("chat.completion.chunk", []), "usage": usage.as_json()}

    def _chunk(self, delta: Json, finish_reason: str | None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk", [choice])

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
