"""What goes out: OpenAI's response objects, whole and in chunks, for both endpoints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swarm_node.gateway import logprobs
from swarm_node.gateway.choice import Piece, Whole
from swarm_node.gateway.tool_calls import ToolCall

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """`cached_tokens` of the prompt were in the servers' caches already."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Shape(Protocol):
    """One endpoint's objects for one request."""

    @property
    def id(self) -> str: ...

    def whole(self, choices: Sequence[Whole], usage: Usage) -> Json: ...

    def first_chunk(self, index: int, /) -> Json | None: ...

    def chunk(self, index: int, piece: Piece) -> Json: ...

    def last_chunk(self, index: int, finish_reason: str) -> Json: ...

    def usage_chunk(self, usage: Usage) -> Json: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What both shapes are told. `with_usage`: every chunk has the field, null until the last."""

    id: str
    model: str
    created: int
    with_usage: bool = False
    with_logprobs: bool = False

    def object(self, kind: str, choices: list[Json], usage: Usage | None = None) -> Json:
        whole: Json = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        if usage or self.with_usage:
            whole["usage"] = usage.as_json() if usage else None
        return whole


@dataclass(frozen=True, slots=True)
class CompletionShape:
    shaping: Shaping

    @property
    def id(self) -> str:
        return self.shaping.id

    def whole(self, choices: Sequence[Whole], usage: Usage) -> Json:
        written = [self._choice(i, one, one.finish_reason) for i, one in enumerate(choices)]
        return self.shaping.object("text_completion", written, usage)

    def first_chunk(self, _index: int) -> Json | None:
        return None

    def chunk(self, index: int, piece: Piece) -> Json:
        return self.shaping.object("text_completion", [self._choice(index, piece, None)])

    def last_chunk(self, index: int, finish_reason: str) -> Json:
        return self.shaping.object("text_completion", [self._choice(index, None, finish_reason)])

    def usage_chunk(self, usage: Usage) -> Json:
        return self.shaping.object("text_completion", [], usage)

    def _choice(self, index: int, said: Whole | Piece | None, finish_reason: str | None) -> Json:
        probable = logprobs.of_completion(said.entries) if said and self.shaping.with_logprobs else None
        text = said.text if said else ""
        return {"index": index, "text": text, "logprobs": probable, "finish_reason": finish_reason}


@dataclass(frozen=True, slots=True)
class ChatShape:
    shaping: Shaping

    @property
    def id(self) -> str:
        return self.shaping.id

    def whole(self, choices: Sequence[Whole], usage: Usage) -> Json:
        return self.shaping.object("chat.completion", [self._message(i, one) for i, one in enumerate(choices)], usage)

    def first_chunk(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def chunk(self, index: int, piece: Piece) -> Json:
        delta = {"tool_calls": [_call(piece.call, piece.call.index)]} if piece.call else {"content": piece.text}
        return self._chunk(index, delta, piece=piece)

    def last_chunk(self, index: int, finish_reason: str) -> Json:
        return self._chunk(index, {}, finish_reason=finish_reason)

    def usage_chunk(self, usage: Usage) -> Json:
        return self.shaping.object("chat.completion.chunk", [], usage)

    def _message(self, index: int, one: Whole) -> Json:
        message: Json = {"role": "assistant", "content": one.text, "refusal": None}
        if one.calls:
            message["content"] = one.text or None
            message["tool_calls"] = [_call(call) for call in one.calls]
        probable = logprobs.of_chat(one.entries) if self.shaping.with_logprobs else None
        return {"index": index, "message": message, "logprobs": probable, "finish_reason": one.finish_reason}

    def _chunk(self, index: int, delta: Json, *, piece: Piece | None = None, finish_reason: str | None = None) -> Json:
        probable = logprobs.of_chat(piece.entries) if piece and self.shaping.with_logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": probable, "finish_reason": finish_reason}
        return self.shaping.object("chat.completion.chunk", [choice])


def _call(call: ToolCall, index: int | None = None) -> Json:
    """Chunks number the calls."""
    written: Json = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return written if index is None else {"index": index, **written}
