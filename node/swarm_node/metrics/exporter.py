"""What a daemon does to be seen while it lives: its sources are read, `/metrics` is answered, traces leave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.network.libp2p.libp2p_network import Libp2pNetwork
from swarm_protocol.errors import StartError
from swarm_protocol.version import software_version

from swarm_node.gateway.http_server import listen
from swarm_node.metrics.endpoint import exposed
from swarm_node.metrics.of_node import read_network, read_node
from swarm_node.metrics.otel_traces import open_traces
from swarm_node.node import Node
from swarm_node.settings import Endpoint


@asynccontextmanager
async def telling(node: Node, network: Libp2pNetwork) -> AsyncIterator[None]:
    """Raises StartError if `--metrics` cannot be listened on, ConfigError if `--otlp` lacks what it needs."""
    about = {"service.version": software_version(), "service.instance.id": network.peer_id}
    node.traces = open_traces(node.config.otlp, about)
    try:
        with node.metrics.reading(lambda: read_node(node)), node.metrics.reading(lambda: read_network(network)):
            async with exposed(node.metrics, _bound(node.config.metrics)) as url:
                if url:
                    node.emitter.emit("metrics", url=url)
                yield
    finally:
        await asyncio.to_thread(node.traces.close)


def _bound(endpoint: Endpoint | None) -> socket.socket | None:
    if endpoint is None:
        return None
    try:
        return listen(endpoint.host, endpoint.port)
    except StartError as error:
        raise StartError(
            f"metrics cannot be answered on {endpoint.host} port {endpoint.port}: {error.__cause__}",
            remedy="give --metrics an address of this machine and a free port; port 0 is any free one",
        ) from error
