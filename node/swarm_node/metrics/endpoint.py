"""`/metrics` on an address of its own, for daemons that speak no other HTTP, in the daemon's own loop.

Bounds on connections are the gateway's, with room for a few scrapers only.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm_node.gateway.http_server import serving
from swarm_node.metrics.metric_registry import CONTENT_TYPE, Registry

MAX_CONNECTIONS = 16


@asynccontextmanager
async def exposed(registry: Registry, listener: socket.socket | None) -> AsyncIterator[str]:
    """Answer on `listener` while the context lasts, and close it; the value is the URL. Without one nothing happens."""
    if listener is None:
        yield ""
        return

    async def metrics(_request: Request) -> Response:
        return Response(registry.exposition(), media_type=CONTENT_TYPE)

    app = Starlette(routes=[Route("/metrics", metrics)])
    async with serving(app, listener, max_connections=MAX_CONNECTIONS) as url:
        yield f"{url}/metrics"
