"""The gateway's routes over one SDK client.

CORS is off: pages in a browser cannot use somebody's gateway. Everything a request needs for its time is in
`streaming.Answer`; this module says which request becomes which generations.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from swarm.client.request import Question as Prompt

from swarm_node.gateway import api_errors, http_limits, openapi
from swarm_node.gateway.access import Access
from swarm_node.gateway.answering import Answerer, Question
from swarm_node.gateway.api_errors import ApiError
from swarm_node.gateway.backend import Backend
from swarm_node.gateway.body import BoundedBody
from swarm_node.gateway.chat_schema import ChatRequest
from swarm_node.gateway.embeddings import Texts
from swarm_node.gateway.keys import KeyRing
from swarm_node.gateway.metrics import Counted, Metrics
from swarm_node.gateway.models import Models
from swarm_node.gateway.rate_limit import Allowances, Rates
from swarm_node.gateway.request_schema import CompletionRequest
from swarm_node.gateway.responses import ChatShape, CompletionShape, Json, Shaping
from swarm_node.metrics.metric_registry import CONTENT_TYPE, Registry
from swarm_node.metrics.otel_traces import NO_TRACES, Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """`rates` are of a key without its own, or of each address where there are no `keys`."""

    max_requests: int = http_limits.MAX_RUNNING_REQUESTS
    rates: Rates = Rates()  # noqa: RUF009 it is frozen
    keys: KeyRing | None = None
    registry: Registry = field(default_factory=Registry)
    traces: Traces = NO_TRACES


def create_app(client: Backend, options: GatewayOptions | None = None) -> FastAPI:
    """The ASGI application. `client` is used, never closed."""
    options = options or GatewayOptions()
    gateway = Gateway(client, options)
    app = FastAPI(title="Swarm gateway", docs_url=None, redoc_url=None)
    app.state.first_tokens = gateway.metrics.first_tokens
    app.add_middleware(BoundedBody)
    allowances = Allowances(time.monotonic)
    app.add_middleware(Access, keys=options.keys, rates=options.rates, allowances=allowances)
    app.add_middleware(Counted, metrics=gateway.metrics)
    api_errors.install(app)
    for path, endpoint, method, about in (
        ("/v1/models", gateway.list_models, "GET", openapi.MODELS),
        ("/v1/models/{model:path}", gateway.show_model, "GET", openapi.MODEL),
        ("/v1/completions", gateway.complete, "POST", openapi.COMPLETION),
        ("/v1/chat/completions", gateway.chat, "POST", openapi.CHAT),
        ("/v1/embeddings", gateway.texts.embed, "POST", openapi.EMBEDDINGS),
        ("/tokenize", gateway.texts.tokenize, "POST", openapi.TOKENS),
        ("/detokenize", gateway.texts.detokenize, "POST", openapi.TEXT),
        ("/v1/traces/{trace_id}", gateway.show_trace, "GET", openapi.TRACE),
        ("/health", gateway.health, "GET", openapi.HEALTH),
        ("/metrics", gateway.show_metrics, "GET", openapi.METRICS),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_class=about.kind, responses=about.responses)
    return app


class Gateway:
    """Turns requests into generations."""

    def __init__(self, client: Backend, options: GatewayOptions) -> None:
        self._registry = options.registry
        self.metrics = Metrics(options.registry)
        self._models = Models(client)
        self._answerer = Answerer(
            client, self._models, self.metrics, traces=options.traces, max_requests=options.max_requests
        )
        self.texts = Texts(client, self._models, self.metrics, self._answerer.gate)

    async def list_models(self) -> Json:
        return {"object": "list", "data": await self._models.all()}

    async def show_model(self, model: str) -> Json:
        return await self._models.one(model)

    async def health(self) -> Response:
        """200 while some model is served whole. Else 503 with the missing blocks."""
        body = {**await self._models.health(), "running_requests": self._answerer.gate.num_running}
        return JSONResponse(body, status_code=200 if body["status"] == "ok" else 503)

    async def show_metrics(self) -> Response:
        """For Prometheus."""
        return Response(self._registry.exposition(), media_type=CONTENT_TYPE)

    async def complete(self, body: CompletionRequest) -> Response:
        """Continue one prompt or several, each `n` times."""
        shape = CompletionShape(_shaping("cmpl", body, with_logprobs=body.logprobs is not None))
        question = Question(
            request=body,
            prompts=[Prompt(prompt=prompt) for prompt in body.prompt],
            max_tokens=body.num_new_tokens,
            num_logprobs=body.logprobs,
        )
        return self._answerer.answer(shape, question)

    async def chat(self, body: ChatRequest) -> Response:
        """Answer a conversation `n` times."""
        shape = ChatShape(_shaping("chatcmpl", body, with_logprobs=body.logprobs))
        tools = body.offered_tools()
        question = Question(
            request=body,
            prompts=[
                Prompt(
                    prompt=None,
                    messages=[message.flat() for message in body.messages],
                    tools=tools,
                    template_kwargs=body.chat_template_kwargs,
                )
            ],
            max_tokens=body.num_new_tokens,
            num_logprobs=body.num_logprobs,
            tools=[tool["function"]["name"] for tool in tools],
        )
        return self._answerer.answer(shape, question)

    async def show_trace(self, trace_id: str) -> Json:
        """The servers that answer, or answered, the request of this id (also in its `x-swarm-trace` header)."""
        trace = self._answerer.traces.get(trace_id)
        if trace is None:
            raise ApiError(404, f"no trace of '{trace_id}': only the newest are kept", code="not_found")
        return {"id": trace_id, **trace}


def _shaping(kind: str, request: CompletionRequest | ChatRequest, *, with_logprobs: bool) -> Shaping:
    return Shaping(
        id=f"{kind}-{secrets.token_hex(12)}",
        model=request.model,
        created=int(time.time()),
        with_usage=request.include_usage,
        with_logprobs=with_logprobs,
    )
