"""The routes for embeddings, tokenizing and detokenizing, with their request bodies.

Embeddings have OpenAI's API, and tokens have vLLM's. An embedding is the mean of a text's last hidden states (after the
model's last norm), scaled to length 1. The models here are trained to continue texts: their vectors distinguish texts,
but are worse than those of a model trained for embeddings.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Coroutine, Sequence
from contextlib import closing
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Discriminator, Field, Tag
from swarm.client import AsyncClient
from swarm.client.request import Prompt

from swarm_node.gateway import http_limits
from swarm_node.gateway.admission import RATE_LIMITER
from swarm_node.gateway.answer_slots import AnswerSlots
from swarm_node.gateway.answering import until_gone
from swarm_node.gateway.chat_schema import Messages, TemplateKwargs, Tools, chat_prompt
from swarm_node.gateway.completion_schema import one_prompt_or_many
from swarm_node.gateway.metrics import Metrics
from swarm_node.gateway.request_schema import (
    Label,
    ModelName,
    Neutral,
    OrDefault,
    StrictBody,
    Text,
    TokenId,
    TokenIds,
)
from swarm_node.gateway.responses import Detokenized, TokenList, json_response, usage_of
from swarm_node.gateway.served_models import Models
from swarm_node.http.rate_limit import RateLimiter

ManyInputs = Annotated[
    list[Text | TokenIds], Field(min_length=1, max_length=http_limits.MAX_EMBEDDING_INPUTS, fail_fast=True)
]
Inputs = Annotated[ManyInputs, BeforeValidator(one_prompt_or_many, json_schema_input_type=Text | TokenIds | ManyInputs)]


class EmbeddingRequest(StrictBody):
    """The body of an embedding request. After validation `input` is always a list. The model decides the vectors'
    length."""

    neutral: ClassVar[Neutral] = {
        "add_special_tokens": (True,),
        "dimensions": (),
        "normalize": (True,),
        "priority": (0,),
        "truncate_prompt_tokens": (),
    }

    model: ModelName
    input: Inputs
    encoding_format: Annotated[Literal["float", "base64"], OrDefault("float")] = "float"
    user: Label | None = None


class TokenizeText(StrictBody):
    """The body of `/tokenize` for a text."""

    neutral: ClassVar[Neutral] = {"add_special_tokens": (True,), "return_token_strs": (False,)}

    model: ModelName
    prompt: Text


class TokenizeChat(StrictBody):
    """The body of `/tokenize` for a conversation."""

    neutral: ClassVar[Neutral] = {
        "add_special_tokens": (False,),
        "chat_template": (),
        "continue_final_message": (False,),
        "mm_processor_kwargs": (),
        "return_token_strs": (False,),
    }

    model: ModelName
    messages: Messages
    tools: Tools = Field(default_factory=list)
    add_generation_prompt: Annotated[bool, OrDefault(True)] = True
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)


def _kind(body: object) -> str:
    return "TokenizeChat" if isinstance(body, dict) and "messages" in body else "TokenizeText"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("TokenizeText")] | Annotated[TokenizeChat, Tag("TokenizeChat")], Discriminator(_kind)
]


class DetokenizeRequest(StrictBody):
    """The body of `/detokenize`."""

    model: ModelName
    tokens: Annotated[list[TokenId], Field(max_length=http_limits.MAX_TOKEN_IDS, fail_fast=True)]


class Texts:
    """The routes over the client. Each request takes one of the `slots`, as an answer does, or several if it has many
    inputs, and ends if its caller disconnects."""

    def __init__(self, client: AsyncClient, models: Models, metrics: Metrics, slots: AnswerSlots) -> None:
        self._client = client
        self._models = models
        self._metrics = metrics
        self._slots = slots

    async def embed(self, body: EmbeddingRequest, request: Request) -> Response:
        """Embed one or several texts: the mean of the last hidden states, scaled to length 1."""
        num_slots = math.ceil(len(body.input) / http_limits.INPUTS_PER_ANSWER)
        return await self._answered(request, body.model, self._embed(body, request.scope[RATE_LIMITER]), num_slots)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a text, or of messages rendered with the model's chat template."""
        return await self._answered(request, body.model, self._tokenize(body))

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of tokens, without special tokens."""
        return await self._answered(request, body.model, self._detokenize(body))

    async def _answered(
        self, request: Request, model: str, answering: Coroutine[Any, Any, Response], num_slots: int = 1
    ) -> Response:
        with closing(answering), self._slots.take(num_slots, model, request.scope[RATE_LIMITER]):
            return await until_gone(request.receive, answering)

    async def _embed(self, body: EmbeddingRequest, limiter: RateLimiter) -> Response:
        await self._models.check_served(body.model)
        async with asyncio.timeout(http_limits.GENERATION_TIMEOUT_S):
            inputs = [await self._client.tokenize(Prompt(prompt=given), model=body.model) for given in body.input]
            num_tokens = sum(map(len, inputs))
            limiter.settle(limiter.reserve(num_tokens), num_tokens)
            vectors = [await self._client.pooled(token_ids, model=body.model) for token_ids in inputs]
        self._metrics.used(usage_of(num_tokens, 0, 0), [])
        content = await asyncio.to_thread(_embeddings, body, vectors, num_tokens)
        return Response(content, media_type="application/json")

    async def _tokenize(self, body: TokenizeRequest) -> Response:
        await self._models.find(body.model)
        if isinstance(body, TokenizeChat):
            # templates need not know `add_generation_prompt`, so it is passed only if it is false
            begins = {} if body.add_generation_prompt else {"add_generation_prompt": False}
            prompt = chat_prompt(body.messages, body.tools, {**body.chat_template_kwargs, **begins})
        else:
            prompt = Prompt(prompt=body.prompt)
        tokens = await self._client.tokenize(prompt, model=body.model)
        longest = await self._client.context_tokens(body.model)
        return json_response(TokenList(count=len(tokens), max_model_len=longest, tokens=tokens, token_strs=None))

    async def _detokenize(self, body: DetokenizeRequest) -> Response:
        await self._models.find(body.model)
        return json_response(Detokenized(prompt=await self._client.decode(body.tokens, model=body.model)))


def _embeddings(body: EmbeddingRequest, vectors: Sequence[Any], num_tokens: int) -> bytes:
    """Encode the answer without pydantic, in a thread: a million numbers take some tenths of a second.

    Each vector is encoded on its own, so that this holds up the event loop for one vector and not for all of them.
    """
    data = ", ".join(
        json.dumps({"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)})
        for index, vector in enumerate(vectors)
    )
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    rest = json.dumps({"object": "list", "model": body.model, "usage": usage})
    return f'{{"data": [{data}], {rest[1:]}'.encode()


def _written(vector: Any, encoding: str) -> str | list[float]:
    numbers = vector.numpy().astype("<f4")
    return base64.b64encode(numbers.tobytes()).decode() if encoding == "base64" else numbers.tolist()
