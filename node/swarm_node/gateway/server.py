"""Runs the gateway's app with uvicorn inside the loop that is already there.

uvicorn would take the process's signal handlers and exit the interpreter when its port is taken; both are the
daemon's business, so the socket is bound here and the handlers stay.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI
from swarm_protocol.errors import StartError

from swarm_node.gateway import bounds


@asynccontextmanager
async def serving(app: FastAPI, host: str, port: int) -> AsyncIterator[str]:
    """Serve `app` while the context lasts; the value is its base URL. `port` 0 takes a free one.

    Raises StartError if the address cannot be listened on. Leaving gives running answers SHUTDOWN_GRACE_S to finish.
    """
    listener = _bind(host, port)
    address = listener.getsockname()
    server = _Server(_config(app))
    running = asyncio.create_task(server.serve(sockets=[listener]), name="gateway http")
    try:
        yield f"http://[{address[0]}]:{address[1]}" if ":" in address[0] else f"http://{address[0]}:{address[1]}"
    finally:
        server.should_exit = True
        await running
        listener.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=bounds.MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(bounds.SHUTDOWN_GRACE_S),
    )


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"--host {host} is not an address of this machine: {error}", remedy="use 127.0.0.1") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # a bound port alone does not keep others off it
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            remedy="another program may have it: choose another --port, or 0 for any free one",
        ) from error
    listener.setblocking(False)
    return listener
