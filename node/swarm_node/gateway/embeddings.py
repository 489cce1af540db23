"""Embeddings, tokens of texts, and texts of tokens: what is asked for beside answers.

An embedding is the mean of a text's last hidden states (after the model's last norm), scaled to length 1. Models here
are trained to continue texts: such vectors tell texts apart, and are no match for those of a model made for that.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from swarm.client.request import Question

from swarm_node.gateway import http_limits
from swarm_node.gateway.access import ALLOWANCE
from swarm_node.gateway.backend import Backend
from swarm_node.gateway.metrics import Metrics
from swarm_node.gateway.models import Models
from swarm_node.gateway.rate_limit import Allowance
from swarm_node.gateway.request_admission import Gate
from swarm_node.gateway.responses import Usage
from swarm_node.gateway.streaming import until_gone
from swarm_node.gateway.text_schema import DetokenizeRequest, EmbeddingRequest, TokenizeChat, TokenizeRequest


class Texts:
    """Routes over the client. Each request takes a slot of the `gate`, as an answer does, and ends with its caller."""

    def __init__(self, client: Backend, models: Models, metrics: Metrics, gate: Gate) -> None:
        self._client = client
        self._models = models
        self._metrics = metrics
        self._gate = gate

    async def embed(self, body: EmbeddingRequest, request: Request) -> Response:
        """Vectors of one text or several: the mean of the last hidden states, scaled to length 1."""
        with self._gate.slots(1):
            return await until_gone(request.receive, self._embed(body, request.scope.get(ALLOWANCE)))

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """The tokens of a text, or of messages by the model's chat template."""
        with self._gate.slots(1):
            return await until_gone(request.receive, self._tokenize(body))

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """The text of tokens, without special ones."""
        with self._gate.slots(1):
            return await until_gone(request.receive, self._detokenize(body))

    async def _embed(self, body: EmbeddingRequest, allowance: Allowance | None) -> Response:
        await self._models.check_served(body.model)
        async with asyncio.timeout(http_limits.GENERATION_TIMEOUT_S):
            inputs = [await self._token_ids(body.model, given) for given in body.input]
            num_tokens = sum(map(len, inputs))
            reserved = allowance.reserve(num_tokens) if allowance else 0
            try:
                vectors = [await self._client.pooled(token_ids, model=body.model) for token_ids in inputs]
            finally:
                if allowance:
                    allowance.settle(reserved, num_tokens)
        self._metrics.used(Usage(prompt_tokens=num_tokens, completion_tokens=0, cached_tokens=0), [])
        content = await asyncio.to_thread(_embeddings, body, vectors, num_tokens)
        return Response(content, media_type="application/json")

    async def _tokenize(self, body: TokenizeRequest) -> Response:
        await self._models.find(body.model)
        if isinstance(body, TokenizeChat):
            # a template that is not asked to begin an answer need not know of that
            begins = {} if body.add_generation_prompt else {"add_generation_prompt": False}
            question = Question(
                prompt=None,
                messages=[message.flat() for message in body.messages],
                tools=[tool.model_dump(exclude_none=True) for tool in body.tools],
                template_kwargs={**body.chat_template_kwargs, **begins},
            )
        else:
            question = Question(prompt=body.prompt)
        tokens = await self._client.tokenize(question, model=body.model)
        longest = await self._client.context_tokens(body.model)
        return JSONResponse(
            {"count": len(tokens), "max_model_len": longest, "tokens": list(tokens), "token_strs": None}
        )

    async def _detokenize(self, body: DetokenizeRequest) -> Response:
        await self._models.find(body.model)
        return JSONResponse({"prompt": await self._client.decode(body.tokens, model=body.model)})

    async def _token_ids(self, model: str, given: str | list[int]) -> Sequence[int]:
        return await self._client.tokenize(Question(prompt=given), model=model)


def _embeddings(body: EmbeddingRequest, vectors: Sequence[Any], num_tokens: int) -> bytes:
    """Written off the loop: a million numbers take some tenths of a second."""
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json.dumps({"object": "list", "data": data, "model": body.model, "usage": usage}).encode()


def _written(vector: Any, encoding: str) -> str | list[float]:
    numbers = vector.numpy().astype("<f4")
    return base64.b64encode(numbers.tobytes()).decode() if encoding == "base64" else numbers.tolist()
