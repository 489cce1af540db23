"""Runs the gateway's app with uvicorn inside the loop that is already there.

uvicorn would take the process's signal handlers and exit the interpreter when its port is taken; both are the
daemon's business, so the socket is bound here and the handlers stay.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp
from swarm_protocol.errors import StartError

from swarm_node.gateway import connections, http_limits

BACKLOG = 256
"""Connections that wait to be accepted. All may be at once, before the bound on open ones is looked at."""


@asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket, *, max_connections: int | None = None) -> AsyncIterator[str]:
    """Serve `app` on `listener` while the context lasts, and close it; the value is the base URL.

    Leaving gives running answers SHUTDOWN_GRACE_S to finish.
    """
    host, port = listener.getsockname()[:2]
    server = _Server(_config(app, max_connections or connections.max_connections()))
    running = asyncio.create_task(server.serve(sockets=[listener]), name="gateway http")
    try:
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await running
        listener.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, max_connections: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connections.bounded_protocol(max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(http_limits.SHUTDOWN_GRACE_S),
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to from now on, and are answered on once it is served. Port 0: any free one.

    Raises StartError if the address cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"--host {host} is not an address of this machine: {error}", remedy="use 127.0.0.1") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # a bound port alone does not keep others off it
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            remedy="another program may have it: choose another --port, or 0 for any free one",
        ) from error
    listener.setblocking(False)
    return listener


def is_local(host: str) -> bool:
    """Whether only programs on this machine reach `host`. Raises StartError if it is no address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StartError(f"--host {host} is not an address of this machine: {error}", remedy="use 127.0.0.1") from error
    return all(ipaddress.ip_address(str(address[0]).split("%", 1)[0]).is_loopback for *_, address in found)
