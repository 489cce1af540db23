"""The gateway's routes over one SDK client.

CORS is off: pages in a browser cannot use somebody's gateway. Everything a request needs for its time is in
`streaming.Answer`; this module says which request becomes which generation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from swarm_node.gateway import bounds, errors
from swarm_node.gateway.admission import Gate
from swarm_node.gateway.backend import Backend, Generation, ModelStatus
from swarm_node.gateway.body import BoundedBody
from swarm_node.gateway.errors import ApiError
from swarm_node.gateway.schema import ChatRequest, CompletionRequest, SamplingRequest
from swarm_node.gateway.shapes import ChatShape, CompletionShape, Json, Shape
from swarm_node.gateway.streaming import Answer
from swarm_node.gateway.traces import TraceStore


def create_app(client: Backend, *, max_requests: int = bounds.MAX_RUNNING_REQUESTS) -> FastAPI:
    """The ASGI application. `client` is used, never closed."""
    gateway = Gateway(client, max_requests=max_requests)
    app = FastAPI(title="Swarm gateway", docs_url=None, redoc_url=None)
    app.add_middleware(BoundedBody)
    errors.install(app)
    app.add_api_route("/v1/models", gateway.list_models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", gateway.show_model, methods=["GET"])
    app.add_api_route("/v1/completions", gateway.complete, methods=["POST"], response_class=JSONResponse)
    app.add_api_route("/v1/chat/completions", gateway.chat, methods=["POST"], response_class=JSONResponse)
    app.add_api_route("/v1/traces/{trace_id}", gateway.show_trace, methods=["GET"])
    app.add_api_route("/health", gateway.health, methods=["GET"])
    return app


class Gateway:
    """Turns requests into generations. State: the running requests' gate and the newest traces."""

    def __init__(self, client: Backend, *, max_requests: int) -> None:
        self._client = client
        self._gate = Gate(max_requests)
        self._traces = TraceStore()

    async def list_models(self) -> Json:
        models = await self._client.models()
        return {"object": "list", "data": [_model_object(model) for model in models]}

    async def show_model(self, model: str) -> Json:
        return _model_object(await self._find(model))

    async def health(self) -> JSONResponse:
        """200 while some model is served whole: anyone can announce a part of one. Else 503 with the missing blocks."""
        models = await self._client.models()
        whole = any(not model.missing for model in models)
        body = {
            "status": "ok" if whole else "unavailable",
            "detail": "; ".join(map(_describe, models)) or "no server of any model is known",
            "models": [_coverage(model) for model in models],
            "running_requests": self._gate.num_running,
        }
        return JSONResponse(body, status_code=200 if whole else 503)

    async def complete(self, body: CompletionRequest) -> Response:
        shape = CompletionShape(id=_new_id("cmpl"), model=body.model, created=int(time.time()))
        return self._answer(shape, body, {"prompt": body.prompt}, body.num_new_tokens)

    async def chat(self, body: ChatRequest) -> Response:
        shape = ChatShape(id=_new_id("chatcmpl"), model=body.model, created=int(time.time()))
        return self._answer(shape, body, {"messages": [m.flat() for m in body.messages]}, body.num_new_tokens)

    async def show_trace(self, trace_id: str) -> Json:
        """The servers that answer, or answered, the request of this id (also in its `x-swarm-trace` header)."""
        trace = self._traces.get(trace_id)
        if trace is None:
            raise ApiError(404, f"no trace of '{trace_id}': only the newest are kept", code="not_found")
        return {"id": trace_id, **trace}

    def _answer(self, shape: Shape, request: SamplingRequest, prompt: dict[str, Any], max_tokens: int) -> Answer:
        @asynccontextmanager
        async def begin() -> AsyncIterator[Generation]:
            with self._gate.slot():
                await self._check_served(request.model)
                generation = self._client.generate(
                    **prompt,
                    model=request.model,
                    max_tokens=max_tokens,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    top_k=request.top_k,
                    seed=request.seed,
                    stop=request.stop,
                )
                self._traces.begin(shape.id, generation.trace)
                try:
                    yield generation
                finally:
                    self._traces.finish(shape.id)
                    await generation.aclose()

        return Answer(shape, begin, stream=request.stream, include_usage=request.include_usage)

    async def _find(self, name: str) -> ModelStatus:
        if found := await self._client.model(name):
            return found
        known = ", ".join(f"'{model.name}'" for model in await self._client.models()) or "none"
        raise ApiError(
            404, f"the model '{name}' is not served here; served: {known}", code="model_not_found", param="model"
        )

    async def _check_served(self, name: str) -> None:
        model = await self._find(name)
        if model.missing:
            raise ApiError(
                503, _describe(model), code="model_not_served", param="model", retry_after_s=bounds.RETRY_AFTER_S
            )


def _describe(model: ModelStatus) -> str:
    if not model.missing:
        return f"{model.name}: all {model.num_blocks} blocks are served"
    gaps = ", ".join(f"{start} to {end}" for start, end in model.missing)
    return f"{model.name}: nobody serves blocks {gaps} of {model.num_blocks}"


def _coverage(model: ModelStatus) -> Json:
    gaps = [list(gap) for gap in model.missing]
    return {"id": model.name, "num_blocks": model.num_blocks, "missing_blocks": gaps}


def _model_object(model: ModelStatus) -> Json:
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "swarm"}


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
