"""The gateway's routes over one SDK client.

Browsers let no page of another origin use the gateway (CORS), except those in `allowed_origins`. This module maps
requests to generations.
`answering.GenerationResponse` owns everything that a request needs while it runs.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from swarm.client import AsyncClient

from swarm_node.gateway import api_errors, http_limits, responses
from swarm_node.gateway.admission import AccessControl, BodyLimit, KeyRing
from swarm_node.gateway.answering import Answerer, GenerationResponse, ParsedRequest
from swarm_node.gateway.chat_schema import ChatRequest
from swarm_node.gateway.completion_schema import CompletionRequest
from swarm_node.gateway.metrics import Metrics, RequestCounter, Trace
from swarm_node.gateway.responses import ChatBuilder, CompletionBuilder, ResponseHead, json_response
from swarm_node.gateway.responses_events import RESPONSE, ResponsesBuilder
from swarm_node.gateway.responses_schema import ResponsesRequest
from swarm_node.gateway.served_models import Models
from swarm_node.gateway.texts import Texts
from swarm_node.http.field_words import shown
from swarm_node.http.http_error import HttpError, install_description
from swarm_node.http.rate_limit import RateLimiters, Rates
from swarm_node.metrics.metric_registry import CONTENT_TYPE, Registry
from swarm_node.metrics.otel_traces import NO_TRACES, Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Options of the gateway.

    `rates` apply to a key without rates of its own or, where there are no `keys`, to each address.
    """

    max_requests: int = http_limits.MAX_RUNNING_REQUESTS
    rates: Rates = Rates()  # noqa: RUF009 Rates is frozen
    keys: KeyRing | None = None
    allowed_origins: Sequence[str] = ()
    registry: Registry = field(default_factory=Registry)
    traces: Traces = NO_TRACES


def create_app(client: AsyncClient, options: GatewayOptions | None = None) -> FastAPI:
    """Return the ASGI application. It uses `client` and never closes it."""
    options = options or GatewayOptions()
    gateway = Gateway(client, options)
    # behind a proxy that ends TLS, a redirect to the path without a slash would lead to http
    app = FastAPI(title="Swarm gateway", openapi_url=None, redirect_slashes=False)
    app.state.first_tokens = gateway.metrics.first_tokens
    app.add_middleware(BodyLimit)
    limiters = RateLimiters(time.monotonic)
    app.add_middleware(AccessControl, keys=options.keys, rates=options.rates, limiters=limiters)
    app.add_middleware(RequestCounter, metrics=gateway.metrics)
    if options.allowed_origins:
        # outermost, since a browser asks for permission without a key, and shows a page no error without permission
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    api_errors.install(app)
    install_description(app, "/openapi.json")
    for path, endpoint, method, doc in (
        ("/v1/models", gateway.list_models, "GET", responses.MODELS),
        ("/v1/models/{model:path}", gateway.show_model, "GET", responses.MODEL),
        ("/v1/completions", gateway.complete, "POST", responses.COMPLETION),
        ("/v1/chat/completions", gateway.chat, "POST", responses.CHAT),
        ("/v1/responses", gateway.respond, "POST", RESPONSE),
        ("/v1/embeddings", gateway.texts.embed, "POST", responses.EMBEDDINGS),
        ("/tokenize", gateway.texts.tokenize, "POST", responses.TOKENS),
        ("/detokenize", gateway.texts.detokenize, "POST", responses.TEXT),
        ("/v1/traces/{trace_id}", gateway.show_trace, "GET", responses.TRACE),
        ("/health", gateway.health, "GET", responses.HEALTH),
        ("/metrics", gateway.show_metrics, "GET", responses.METRICS),
    ):
        kind = PlainTextResponse if doc is responses.METRICS else JSONResponse
        app.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_class=kind,
            responses=doc,
            route_class_override=UniqueKeysRoute,
        )
        if method == "GET":  # monitors use HEAD to see whether a page is there
            app.add_api_route(path, endpoint, methods=["HEAD"], response_class=kind, include_in_schema=False)
    return app


class Gateway:
    """Turns requests into generations."""

    def __init__(self, client: AsyncClient, options: GatewayOptions) -> None:
        self._registry = options.registry
        self.metrics = Metrics(options.registry)
        self._models = Models(client)
        self._answerer = Answerer(
            client, self._models, self.metrics, traces=options.traces, max_requests=options.max_requests
        )
        self.texts = Texts(client, self._models, self.metrics, self._answerer.slots)

    async def list_models(self) -> Response:
        return json_response(await self._models.all())

    async def show_model(self, model: str) -> Response:
        return json_response(await self._models.one(model))

    async def health(self) -> Response:
        """Return 200 if at least one model has a server for every block, otherwise 503 with the missing blocks."""
        health = await self._models.health(self._answerer.slots.num_running)
        return json_response(health, 200 if health.status == "ok" else 503)

    async def show_metrics(self) -> Response:
        """Return the metrics in the text format of Prometheus."""
        return Response(self._registry.exposition(), media_type=CONTENT_TYPE)

    async def complete(self, body: CompletionRequest) -> Response:
        """Complete one or several prompts, each `n` times. With `echo`, each answer begins with its prompt."""
        return GenerationResponse(self._answerer, CompletionBuilder(_head("cmpl-", body)), body)

    async def chat(self, body: ChatRequest) -> Response:
        """Generate `n` answers to a conversation."""
        return GenerationResponse(self._answerer, ChatBuilder(_head("chatcmpl-", body)), body)

    async def respond(self, body: ResponsesRequest) -> Response:
        """Generate an answer to a conversation, in the form of the Responses API. Nothing is stored."""
        builder = ResponsesBuilder(_head("resp_", body.chat), body.echoed())
        return GenerationResponse(self._answerer, builder, body.chat)

    async def show_trace(self, trace_id: str) -> Trace:
        """Return which servers work or worked on the request with this id. A response has the id in its `x-swarm-trace`
        header."""
        trace = self._answerer.traces.get(trace_id)
        if trace is None:
            raise HttpError(404, f"no trace of '{trace_id}': only the newest traces are kept", code="not_found")
        return {"id": trace_id, **trace}


def _head(prefix: str, request: ParsedRequest) -> ResponseHead:
    return ResponseHead(
        id=f"{prefix}{secrets.token_hex(12)}",
        model=request.model,
        created=int(time.time()),
        with_usage=request.include_usage,
        with_logprobs=request.num_logprobs is not None,
    )


class UniqueKeysRoute(APIRoute):
    """A route that refuses JSON in which an object has a key twice: JSON leaves open which of the two values counts.
    FastAPI reports it as an error in the JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_unique(request: Request) -> Response:
            return await handle(_UniqueKeysRequest(request.scope, request.receive))

        return handle_unique


class _UniqueKeysRequest(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise json.JSONDecodeError(f"an object has the key {shown(twice)} twice", "", 0)
    return values
