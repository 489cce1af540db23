"""What `/openapi.json` says that the routes answer: OpenAI's own types, and ours where it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse, Response
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every failure, and the last event of a stream that fails."""

    error: ErrorDetail


class OtherRevision(BaseModel):
    revision: str
    num_servers: int
    is_whole: bool = Field(description="each block is served by somebody")


class ServedModel(Model):
    """Can be asked for by its `id`, or by `id@revision`, where the digest may be cut to eight digits or more."""

    revision: str = Field(description="digest of the weights that answer")
    other_revisions: list[OtherRevision] = Field(description="other weights that are served under the same name")


class ModelList(BaseModel):
    object: str
    data: list[ServedModel]


class ModelHealth(BaseModel):
    id: str
    num_blocks: int
    missing_blocks: list[tuple[int, int]]
    age_s: float = Field(description="since the server counted on that was heard of least recently was: 30 s is usual")


class Health(BaseModel):
    status: str
    detail: str
    models: list[ModelHealth]
    running_requests: int


@dataclass(frozen=True, slots=True)
class Described:
    """A route's answers by status, and the kind of the usual one."""

    responses: dict[int | str, dict[str, Any]]
    kind: type[Response] = JSONResponse


OF_HTTP = (400, 408, 413, 415)
"""No HTTP, or a body that comes too slowly, is too large or is not said to be JSON; also where none is asked for."""


def _failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody} for status in sorted({*OF_HTTP, 401, 429, 500, *statuses})}


class Tokens(BaseModel):
    count: int
    max_model_len: int = Field(description="how many tokens the model's context has")
    tokens: list[int]
    token_strs: None


class Detokenized(BaseModel):
    prompt: str


def _answers(whole: type[BaseModel], chunk: type[BaseModel]) -> Described:
    events = {"text/event-stream": {"schema": {"type": "string", "description": f"events of {chunk.__name__}"}}}
    answered = {"model": whole, "description": "the answer, or with `stream` its events", "content": events}
    return Described({200: answered, **_failures(404, 503)})


MODELS = Described({200: {"model": ModelList}, **_failures(503)})
MODEL = Described({200: {"model": ServedModel}, **_failures(404, 503)})
COMPLETION = _answers(Completion, Completion)
CHAT = _answers(ChatCompletion, ChatCompletionChunk)
EMBEDDINGS = Described({200: {"model": CreateEmbeddingResponse}, **_failures(404, 503)})
TOKENS = Described({200: {"model": Tokens}, **_failures(404, 503)})
TEXT = Described({200: {"model": Detokenized}, **_failures(404, 503)})
TRACE = Described(_failures(404))
HEALTH = Described({**_failures(), 200: {"model": Health}, 503: {"model": Health}})
METRICS = Described(_failures(), PlainTextResponse)
