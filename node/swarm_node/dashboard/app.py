"""The dashboard as a node's role and as an ASGI application, alone or in one server with a gateway.

The dashboard is public and read-only: it asks for no key. It listens beyond this machine only if `--host` says so.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_node.dashboard import api, pages
from swarm_node.dashboard.collector import check_folders, daemon_collector
from swarm_node.dashboard.live import Live
from swarm_node.dashboard.views import ViewSource
from swarm_node.formatting import shown
from swarm_node.http.addresses import caller_of, checked
from swarm_node.http.field_words import words
from swarm_node.http.http_error import HttpError, install_description, install_errors
from swarm_node.http.rate_limit import RateLimiters, Rates
from swarm_node.http.server import NOT_JOINED, is_local, listen, serving
from swarm_node.node import Node, NodeRole
from swarm_node.settings.config import Config

logger = logging.getLogger(__name__)

HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
"""Default headers of every response. Pages have headers of their own."""

REQUESTS_PER_MIN = 600
"""Maximum requests per minute from one address. A page with its files and its state takes ten requests, then one every
two seconds."""


def create_dashboard(source: ViewSource, *, has_chat: bool = False, checkpoints: Path | None = None) -> FastAPI:
    """Create the application over `source`, which its owner keeps up to date. `has_chat` means that a gateway shares
    the server. `checkpoints` is the directory of the files that it offers.

    Close `state.live` of the application before its server stops: otherwise the server waits for every open stream.
    """
    app = FastAPI(
        title="Swarm dashboard",
        version="1",
        description="What a swarm is doing, as its members' signed records say. Public and read-only.",
        openapi_url=None,
    )
    live = app.state.live = Live(source)
    app.add_middleware(VisitorRates)
    app.add_middleware(DefaultHeaders)
    install_errors(app, partial(_http_error, has_chat), HttpError, RequestValidationError, HTTPException, Exception)
    install_description(app, "/api/v1/openapi.json")
    app.include_router(api.router(source, live, checkpoints))
    app.include_router(pages.router(source, has_chat))
    return app


def _http_error(has_gateway: bool, error: Exception, request: Request) -> HttpError:
    match error:
        case HttpError():
            return error
        case RequestValidationError():
            first = error.errors()[0]
            name = _bounded(str(first["loc"][-1]))
            remedy = "see /api/v1/openapi.json"
            return HttpError(400, f"{name}: {words(first)}", code="invalid_value", param=name, remedy=remedy)
        case HTTPException():
            message = f"{request.method} {_bounded(request.url.path)}: {shown(str(error.detail)).lower()}"
            others = ", and /openapi.json the gateway's" if has_gateway else ""
            remedy = f"/api/v1/openapi.json lists the dashboard's routes{others}"
            if request.url.path == "/try":
                remedy = "only the dashboard of a gateway has this page: swarm-node gateway"
            return HttpError(error.status_code, message, remedy=remedy, headers=error.headers)
        case _:
            logger.error("unexpected error while answering a visitor", exc_info=error)
            return HttpError(500, "the dashboard failed to answer", remedy="its log says why")


def _bounded(text: str) -> str:
    """Return text that a client sent, made printable and short enough to repeat."""
    return shown(text, max_chars=api.MAX_REPEATED_CHARS)


def combined(gateway: Starlette, dashboard: ASGIApp) -> ASGIApp:
    """Combine both in one application.

    The gateway, with its own keys and limits, gets all paths whose first segment is that of a gateway route. It also
    gets requests of programs with a wrong base URL, since its error explains this: those that left out the `/v1` of
    OpenAI's routes, and all with methods that the dashboard does not have.
    """
    paths = {route.path for route in gateway.routes if isinstance(route, Route)}
    beginnings = {path.split("/")[1] for path in paths}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        lacks_beginning = f"/v1{path}" in paths and "text/html" not in Headers(scope=scope).get("accept", "")
        is_gateways = lacks_beginning or path.partition("/")[2].partition("/")[0] in beginnings
        is_gateways = is_gateways or scope.get("method", "GET") not in {"GET", "HEAD"}
        await (gateway if is_gateways else dashboard)(scope, receive, send)

    return app


class VisitorRates:
    """Middleware: answers 429 to an address that asks too often. Without a login, this is the only limit on
    visitors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._rates = Rates(requests_per_min=REQUESTS_PER_MIN)
        self._limiters = RateLimiters(time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._limiters.get(caller_of(scope), self._rates).take_request()
        except HttpError as error:
            remedy = "follow /api/v1/events instead"
            refusal = HttpError(429, error.message, remedy=remedy, retry_after_s=error.retry_after_s)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


class DefaultHeaders:
    """Middleware: adds each of HEADERS that a response lacks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class DashboardRole(NodeRole):
    """Serves pages and API until the node leaves. The constructor binds the port, as a gateway's does.

    Raises ConfigError if a directory is missing or in the way, and StartError if it cannot listen.
    """

    def __init__(self, config: Config) -> None:
        check_folders(config)
        self._listener = listen(config.host, config.port)

    def waiting(self) -> AbstractAsyncContextManager[object]:
        return serving(NOT_JOINED, self._listener.dup())

    async def run(self, node: Node) -> None:
        async with daemon_collector(node) as collector:
            app = create_dashboard(collector, checkpoints=node.config.checkpoints)
            config = node.config
            async with serving(checked(app, config), self._listener, proxies=config.trusted_proxies) as url:
                node.activity.state = "dashboard"
                whom = "this machine" if is_local(node.config.host) else "anyone who reaches it"
                node.steps.done("dashboard", f"pages for {whom}, read-only")
                node.emitter.emit("dashboard", url=url)
                await node.shutdown.leaving.wait()
                app.state.live.close()
