"""The dashboard as an ASGI application, and beside a gateway's in one server. Public: no key is asked for here."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_node.dashboard import answers, api, pages
from swarm_node.dashboard.checkpoints import Checkpoints
from swarm_node.dashboard.live import Live
from swarm_node.dashboard.source import Source
from swarm_node.dashboard.visitors import Bounded

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
"""Of every answer that does not say otherwise, as pages do."""

GATEWAY = ("/v1", "/tokenize", "/detokenize", "/health", "/metrics", "/openapi.json")
"""What a gateway answers, with all below it, where both share a server."""


def create_dashboard(source: Source, *, has_chat: bool = False, checkpoints: Checkpoints | None = None) -> FastAPI:
    """Over `source`, which someone else keeps fresh. `has_chat`: a gateway stands beside it, so one can try it.

    Its `state.live` is to be closed before its server stops, or that waits for every open stream.
    """
    app = FastAPI(
        title="Swarm dashboard",
        version="1",
        description="What a swarm is doing, as its members' signed records say. Public and read-only.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    live = app.state.live = Live(source, time.time)
    app.add_middleware(Bounded)
    app.add_middleware(WithHeaders)
    answers.install(app)
    app.include_router(api.router(source, live, checkpoints))
    app.include_router(pages.router(source, has_chat))
    return app


def beside(gateway: ASGIApp, dashboard: ASGIApp) -> ASGIApp:
    """Both as one application. The gateway keeps its own keys and limits for all that is its."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_gateways = any(path == own or path.startswith(f"{own}/") for own in GATEWAY)
        await (gateway if is_gateways else dashboard)(scope, receive, send)

    return app


class WithHeaders:
    """Middleware: HEADERS, where an answer has no such header of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                names = {name.lower() for name, _ in given}
                message = {**message, "headers": [*given, *(each for each in HEADERS if each[0] not in names)]}
            await send(message)

        await self._app(scope, receive, say)
