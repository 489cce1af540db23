"""Builds the gateway's response objects and their descriptions in `/openapi.json`. The types are OpenAI's where it has
one.

Pure. A builder makes one endpoint's objects for one request, whole and in chunks. Fields that were not set are left out
of the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi.responses import Response
from openai.types import Completion, CompletionChoice, CompletionUsage, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel, Field

from swarm_node.gateway import http_limits
from swarm_node.gateway.choice import Delta, FinishedChoice, FinishReason, ScoredToken, ToolCall, as_text
from swarm_node.http.event_stream import DONE
from swarm_node.http.http_error import ErrorBody, HttpError

Json = dict[str, Any]


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> CompletionUsage:
    """Return the usage. `cached_tokens` counts the prompt's tokens that the servers' caches had."""
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def as_json(value: BaseModel) -> str:
    return value.model_dump_json(exclude_unset=True, by_alias=True)


def json_response(value: BaseModel, status: int = 200) -> Response:
    return Response(as_json(value), status_code=status, media_type="application/json")


# Nested dictionaries are validated in one call. This is several times faster than a constructor for each object, which
# matters because each token is a chunk.


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The fields that all objects of a request share. `with_usage` adds `usage` to every chunk, null until the last
    one."""

    id: str
    model: str
    created: int
    with_usage: bool = False
    with_logprobs: bool = False

    def fields(self, kind: str, choices: list[Json], usage: CompletionUsage | None = None) -> Json:
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return {**fields, "usage": usage} if usage or self.with_usage else fields


class TextLogprobs(Logprobs):
    """OpenAI's probabilities, except that those of an echoed prompt's first token are null."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class TextChoice(CompletionChoice):
    """OpenAI's choice, except that `finish_reason` may be null, as it is before the last chunk of a stream."""

    finish_reason: FinishReason | None  # type: ignore[assignment]
    logprobs: TextLogprobs | None = None


class TextCompletion(Completion):
    """OpenAI's completion object, with this gateway's choices."""

    choices: list[TextChoice]  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class ChunkBuilder:
    """The base of the builders whose streams consist of chunks, each of them one event without a name."""

    last_event: ClassVar[bytes] = DONE

    head: ResponseHead

    def begin(self, _trace: Json) -> None:
        """Get the trace of the answer once its first token is there. A chunk shows nothing of it."""

    def failed(self, failure: HttpError) -> list[BaseModel]:
        return [ErrorBody.model_validate(failure.body)]


@dataclass(frozen=True, slots=True)
class CompletionBuilder(ChunkBuilder):
    """Builds the objects of a completion, whole and in chunks."""

    def whole(self, choices: Sequence[FinishedChoice], usage: CompletionUsage) -> TextCompletion:
        return self._object([self._choice(i, one, one.finish_reason) for i, one in enumerate(choices)], usage)

    def first(self, _index: int) -> list[BaseModel]:
        return []

    def next(self, index: int, delta: Delta) -> list[BaseModel]:
        return [self._object([self._choice(index, delta, None)])]

    def last(self, index: int, finish_reason: FinishReason) -> list[BaseModel]:
        return [self._object([self._choice(index, None, finish_reason)])]

    def ended(self, usage: CompletionUsage) -> list[BaseModel]:
        return [self._object([], usage)] if self.head.with_usage else []

    def _object(self, choices: list[Json], usage: CompletionUsage | None = None) -> TextCompletion:
        return TextCompletion.model_validate(self.head.fields("text_completion", choices, usage))

    def _choice(self, index: int, part: FinishedChoice | Delta | None, finish_reason: FinishReason | None) -> Json:
        logprobs = _text_logprobs(part.tokens) if part and self.head.with_logprobs else None
        return {"index": index, "text": part.text if part else "", "logprobs": logprobs, "finish_reason": finish_reason}


@dataclass(frozen=True, slots=True)
class ChatBuilder(ChunkBuilder):
    """Builds the objects of a chat answer, whole and in chunks."""

    def whole(self, choices: Sequence[FinishedChoice], usage: CompletionUsage) -> ChatCompletion:
        made = [self._choice(i, one) for i, one in enumerate(choices)]
        return ChatCompletion.model_validate(self.head.fields("chat.completion", made, usage))

    def first(self, index: int) -> list[BaseModel]:
        return [self._chunk(index, {"role": "assistant", "content": "", "refusal": None})]

    def next(self, index: int, delta: Delta) -> list[BaseModel]:
        call = delta.call
        made = {"tool_calls": [{"index": call.index, **_call(call)}]} if call else {"content": delta.text}
        return [self._chunk(index, made, logprobs=self._logprobs(delta.tokens))]

    def last(self, index: int, finish_reason: FinishReason) -> list[BaseModel]:
        return [self._chunk(index, {}, finish_reason=finish_reason)]

    def ended(self, usage: CompletionUsage) -> list[BaseModel]:
        chunk = self.head.fields("chat.completion.chunk", [], usage)
        return [ChatCompletionChunk.model_validate(chunk)] if self.head.with_usage else []

    def _choice(self, index: int, one: FinishedChoice) -> Json:
        message: Json = {"role": "assistant", "content": one.text, "refusal": None}
        if one.calls:
            message |= {"content": one.text or None, "tool_calls": [_call(call) for call in one.calls]}
        logprobs = self._logprobs(one.tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": one.finish_reason}

    def _chunk(
        self, index: int, delta: Json, *, logprobs: Json | None = None, finish_reason: FinishReason | None = None
    ) -> ChatCompletionChunk:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return ChatCompletionChunk.model_validate(self.head.fields("chat.completion.chunk", [choice]))

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> Json | None:
        return {"content": scores(tokens), "refusal": None} if self.head.with_logprobs else None


def scores(tokens: Sequence[ScoredToken]) -> list[Json]:
    """Return the probabilities of a chat's tokens."""
    return [
        {
            **_probability(scored.token.data, scored.token.logprob),
            "top_logprobs": [_probability(other.data, other.logprob) for other in scored.token.top],
        }
        for scored in tokens
    ]


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _probability(data: bytes, logprob: float | None) -> Json:
    """Return one token's probability.

    `bytes` are exact. A token that is a part of a character has U+FFFD as its text.
    """
    return {"token": as_text(data), "logprob": _finite(logprob), "bytes": list(data)}


def _text_logprobs(tokens: Sequence[ScoredToken]) -> Json:
    """Return a choice's probabilities. `text_offset` counts characters from the beginning of the choice's own text.

    As in OpenAI's API, `top_logprobs` includes the drawn token.
    """
    return {
        "text_offset": [scored.offset for scored in tokens],
        "token_logprobs": [_finite(scored.token.logprob) if scored.is_scored else None for scored in tokens],
        "tokens": [_name(scored.token.data) for scored in tokens],
        "top_logprobs": [_top(scored) if scored.is_scored else None for scored in tokens],
    }


def _top(scored: ScoredToken) -> dict[str, float]:
    top: dict[str, float] = {}
    for other in scored.token.top:
        top.setdefault(_name(other.data), _finite(other.logprob))
    top.setdefault(_name(scored.token.data), _finite(scored.token.logprob))
    return top


def _name(data: bytes) -> str:
    """Return a token's text, or its bytes if it is a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    assert logprob is not None
    return max(logprob, http_limits.LEAST_LOGPROB) if math.isfinite(logprob) else http_limits.LEAST_LOGPROB


class ServedRevision(BaseModel):
    """One revision of a model that servers announce."""

    revision: str
    num_servers: int
    is_whole: bool = Field(description="whether every block has a server")


class ServedModel(Model):
    """A model. A request names it by `id`, or by `id@revision`, where the digest may be cut to eight or more digits."""

    revision: str = Field(description="digest of the weights in use")
    publisher: str | None = Field(description="peer id of the node that signed the model's manifest; null: unpublished")
    manifest: str | None = Field(description="digest of the manifest")
    standing: str = Field(description="why the publisher is trusted: pinned, remembered, new or unpublished")
    other_revisions: list[ServedRevision] = Field(description="other revisions served under the same name")


class ModelList(BaseModel):
    """All models that can be asked for."""

    object: str
    data: list[ServedModel]


class ModelHealth(BaseModel):
    """Health of one model. `missing_blocks` are the ranges of blocks without a server that this gateway can reach."""

    id: str
    num_blocks: int
    missing_blocks: list[tuple[int, int]]
    age_s: float = Field(
        description="age in seconds of the oldest server record used, usually up to 30 s; a server that was killed "
        "counts until its record is 60 s old, or a request has failed to reach it"
    )


class GatewayHealth(BaseModel):
    """Health of the gateway. `status` is ok if at least one model is fully served."""

    status: str
    detail: str
    models: list[ModelHealth]
    running_requests: int


class TokenList(BaseModel):
    """The tokens of a text, as vLLM's `/tokenize` gives them."""

    count: int
    max_model_len: int = Field(description="maximum context length in tokens")
    tokens: list[int]
    token_strs: None


class Detokenized(BaseModel):
    """The text of tokens, as vLLM's `/detokenize` gives it."""

    prompt: str


Responses = dict[int | str, dict[str, Any]]
"""Responses of a route, by status."""

OF_HTTP = (400, 408, 413, 415)
"""Statuses for invalid HTTP, and for a body that comes too slowly, is too large or is not declared as JSON."""


_FAILURE = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}}
"""Describes the same as `{"model": ErrorBody}`. One status of each route needs that form, but FastAPI makes a validator
for each status that has it."""


def _failures(*statuses: int) -> Responses:
    failures: Responses = dict.fromkeys(sorted({*OF_HTTP, 401, 429, 500, *statuses}), _FAILURE)
    return {**failures, 401: {"model": ErrorBody}}


def streamed(whole: type[BaseModel], chunk: str) -> Responses:
    """Describe a route that answers with `whole` or, with `stream`, with events of the type `chunk`."""
    events = {"text/event-stream": {"schema": {"type": "string", "description": f"events of {chunk}"}}}
    answered = {"model": whole, "description": "the answer, or with `stream` its events", "content": events}
    return {200: answered, **_failures(404, 503)}


def _plain(model: type[BaseModel], *failures: int) -> Responses:
    return {200: {"model": model}, **_failures(503, *failures)}


MODELS = _plain(ModelList)
MODEL = _plain(ServedModel, 404)
COMPLETION = streamed(TextCompletion, TextCompletion.__name__)
CHAT = streamed(ChatCompletion, ChatCompletionChunk.__name__)
EMBEDDINGS = _plain(CreateEmbeddingResponse, 404)
TOKENS = _plain(TokenList, 404)
TEXT = _plain(Detokenized, 404)
TRACE = _failures(404)
HEALTH = {**_failures(), 200: {"model": GatewayHealth}, 503: {"model": GatewayHealth}}
METRICS = dict.fromkeys(_failures(), _FAILURE)  # failures are JSON, although the metrics are text
