"""Exports what a daemon measures while it runs: `/metrics` for Prometheus, and traces for OpenTelemetry.

For daemons without another HTTP server, `/metrics` has its own address and is served in the daemon's event loop. The
limits on connections are those of the gateway, but allow only a few scrapers.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from swarm.network.libp2p_network import Libp2pNetwork
from swarm_protocol.errors import StartError
from swarm_protocol.version import software_version

from swarm_node.events.emitter import Emitter
from swarm_node.http.addresses import KnownHosts
from swarm_node.http.server import is_local, listen, serving
from swarm_node.metrics.metric_registry import CONTENT_TYPE, Registry
from swarm_node.metrics.otel_traces import open_traces
from swarm_node.metrics.readings import read_network, read_node
from swarm_node.node import Node
from swarm_node.settings.config import Config
from swarm_node.settings.parsers import Endpoint


@asynccontextmanager
async def exporting(registry: Registry, config: Config, emitter: Emitter) -> AsyncIterator[None]:
    """Serve the metrics at the address of `--metrics`, if there is one, while the context lasts.

    Raises StartError if the address cannot be listened on.
    """
    if config.metrics is None:
        yield
        return
    async with serving_metrics(registry, bound(config.metrics), config) as url:
        emitter.emit("metrics", url=url)
        yield


@asynccontextmanager
async def measuring(node: Node, network: Libp2pNetwork) -> AsyncIterator[None]:
    """Add what the node and its network measure to its metrics, and export traces, while the context lasts.

    Raises ConfigError if `--otlp` lacks its libraries.
    """
    about = {"service.version": software_version(), "service.instance.id": network.peer_id}
    node.traces = open_traces(node.config.otlp, about)
    try:
        with node.metrics.reading(lambda: read_node(node)), node.metrics.reading(lambda: read_network(network)):
            yield
    finally:
        await asyncio.to_thread(node.traces.close)


def bound(endpoint: Endpoint) -> socket.socket:
    """Listen at the address of `--metrics`. Raises StartError if it is not a free address of this machine."""
    try:
        return listen(endpoint.host, endpoint.port)
    except StartError as error:
        reason = getattr(error.__cause__, "strerror", None) or str(error.__cause__)
        if getattr(error.__cause__, "errno", 0) == errno.EADDRINUSE:
            reason = "the port is in use"
        raise StartError(
            f"--metrics cannot be served on {endpoint.host} port {endpoint.port}: {reason}",
            remedy="give --metrics an address of this machine and a free port; port 0 is any free port",
        ) from error


MAX_CONNECTIONS = 16


@asynccontextmanager
async def serving_metrics(registry: Registry, listener: socket.socket, config: Config) -> AsyncIterator[str]:
    """Serve metrics on `listener` while the context lasts, then close it. Yields the URL.

    On loopback, a request is answered only under a name that no stranger can own (see `http.addresses`): otherwise a
    web page in a browser on this machine could read them. Elsewhere scrapers may use any name.
    """

    async def metrics(_request: Request) -> Response:
        return Response(registry.exposition(), media_type=CONTENT_TYPE)

    app: ASGIApp = Starlette(routes=[Route("/metrics", metrics)])
    if is_local(listener.getsockname()[0]):
        app = KnownHosts(app, config)
    async with serving(app, listener, max_connections=MAX_CONNECTIONS) as url:
        yield f"{url}/metrics"
