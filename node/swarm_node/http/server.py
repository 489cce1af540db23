"""Runs an ASGI application with uvicorn inside the running event loop, with bounded connections.

uvicorn would install its own signal handlers, and would exit the interpreter if its port is taken. Both are the
daemon's business, so this module binds the socket and leaves the handlers alone.

A node is often reached without a reverse proxy, and its HTTP connections share the process's file descriptors with the
swarm. So this module sets the limits that a proxy would set: the number of connections, the time until a request's head
has arrived, and the time until a reader takes buffered data. A silent connection therefore holds a socket only for some
seconds. If there are too many connections, the address that has most loses one: the one that has been silent the
longest, starting with those that never sent a request, or else its newest. New and returning clients are thus answered,
however many connections an address holds, silent or not. Connections of a trusted proxy count as of an address each.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import math
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import chain
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from swarm.ended_tasks import end_tasks
from swarm.network.discovery.own_networks import source_addresses
from swarm_protocol.errors import StartError, reason_of
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm_node.http.addresses import Network, OriginForm, networks_of, party_at
from swarm_node.http.event_stream import EVENT_STREAM, event
from swarm_node.http.http_error import HttpError

BACKLOG = 256
"""Maximum number of connections that wait to be accepted. All of them may be accepted before the limit on open
connections is checked."""

MAX_CONNECTIONS = 1024
"""Maximum number of open connections, most of them idle keep-alives. Fewer if the system allows few open files."""

HTTP_HEAD_TIMEOUT_S = 20.0
"""Time in seconds from opening a connection, or the end of a response, until the head of the next request must be
there."""

HTTP_WRITE_TIMEOUT_S = 30.0
"""A reader that does not take buffered data within this time in seconds is assumed to be gone."""

SHUTDOWN_GRACE_S = 5.0
"""Default time in seconds that a shutdown waits for running responses."""

TELL_S = 1.0
"""Time in seconds to tell clients that their answers are cut. A stalled reader cannot delay a shutdown for longer."""

NOT_JOINED = HttpError(
    503,
    "this node has not joined its network yet",
    code="service_unavailable",
    remedy="its operator sees why with swarm-node status",
    retry_after_s=15.0,
)
"""The answer to all requests while the node reaches no peer. Without it they would wait, as their connections are
accepted."""


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    *,
    max_connections: int | None = None,
    proxies: Sequence[str] = (),
    grace_s: float = SHUTDOWN_GRACE_S,
) -> AsyncIterator[str]:
    """Serve `app` on `listener` while the context lasts, then close it. Yields the base URL, for other machines if they
    can reach it. `proxies` are the trusted ones, whose connections are of many visitors.

    At the end, running responses have `grace_s` to finish. The others are then cut, and their clients are told so.
    """
    host, port = _own_address(listener.getsockname()[0]), listener.getsockname()[1]
    config = uvicorn.Config(
        CutAnswers(OriginForm(app)),
        http=bounded_protocol(max_connections or default_max_connections(), networks_of(proxies)),
        ws="none",  # so middlewares get nothing but HTTP requests
        lifespan="off",
        log_config=None,
        log_level="error",  # at level "warning" anyone could fill the log with invalid requests
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(HTTP_HEAD_TIMEOUT_S),
        timeout_graceful_shutdown=math.ceil(grace_s + SHUTDOWN_GRACE_S),  # after this uvicorn logs an error
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
    try:
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        try:
            await asyncio.wait({running}, timeout=grace_s)
            await _end(server.server_state.tasks)
            server.force_exit = True
            await running
        finally:
            listener.close()
            await end_tasks(running)
            await _end(server.server_state.tasks)


def _own_address(host: str) -> str:
    """Return `host`, or an address of this machine if `host` means all addresses."""
    address = ipaddress.ip_address(host.split("%", 1)[0])
    if not address.is_unspecified:
        return host
    own = (ip for ip in source_addresses() if ipaddress.ip_address(ip).version == address.version)
    return next(own, host)


class CutAnswers:
    """Middleware: tells clients that their answers are cut because the server ends.

    A cancelled response becomes a 503, or ends with an error event if its event stream has begun. Only the server
    cancels the task of a response, and only when it ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: Message | None = None
        is_whole = False

        async def watch(message: Message) -> None:
            nonlocal begun, is_whole
            if message["type"] == "http.response.start":
                begun = message
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            is_plain = begun is not None and not _is_stream(begun)
            if task is None or not task.cancelling() or (is_plain and not is_whole):
                raise
            if is_whole:
                return  # the client has the whole response; only its resources were being freed
            error = HttpError(
                503, "the answer was cut: this server is stopping", code="service_unavailable", remedy="try again"
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(TELL_S):
                    if begun is None:
                        await error(scope, receive, send)
                    else:
                        body = event(json.dumps(error.body))
                        await send({"type": "http.response.body", "body": body, "more_body": False})


def _is_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(EVENT_STREAM.encode()) for name, value in start["headers"])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _end(answering: Collection[asyncio.Task[None]]) -> None:
    """Cancel the responses that still run, and wait until they have freed their resources."""
    for task in answering:
        if not task.cancelling():
            task.cancel()
    if answering:
        await asyncio.wait(tuple(answering))


def listen(host: str, port: int) -> socket.socket:
    """Open a socket to which clients can connect at once; they are answered when it is served. Port 0 takes any free
    port.

    Raises StartError if the address cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError for a name that cannot be looked up
        raise _no_address(host, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # another process can still listen on a port that is only bound
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _no_address(host, error) from error
        raise StartError(
            f"cannot listen on {host} port {port}: {reason_of(error)}",
            remedy="another program may use this port: choose another --port, or 0 for any free port",
        ) from error
    listener.setblocking(False)
    return listener


def is_local(host: str) -> bool:
    """Return whether only programs on this machine can reach `host`. Raises StartError if it is not an address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _no_address(host, error) from error
    return all(ipaddress.ip_address(str(address[0]).split("%", 1)[0]).is_loopback for *_, address in found)


def _no_address(host: str, error: Exception) -> StartError:
    return StartError(f"--host {host} is not an address of this machine: {reason_of(error)}", remedy="use 127.0.0.1")


def default_max_connections() -> int:
    """Return MAX_CONNECTIONS, or half of the files that this process may open if that is less. The swarm needs the
    other half."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(MAX_CONNECTIONS, allowed // 2))


def bounded_protocol(max_open: int, trusted: Sequence[Network]) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP/1.1 protocol class for one server with at most `max_open` connections and these `trusted`
    proxies."""

    class OneServersHttp(BoundedHttp):
        capacity = max_open
        proxies = trusted
        unheard: ClassVar[dict[BoundedHttp, None]] = {}
        idle: ClassVar[dict[BoundedHttp, None]] = {}
        busy: ClassVar[dict[BoundedHttp, None]] = {}

    return OneServersHttp


class BoundedHttp(H11Protocol):
    """One connection. With a running request, it is in `busy`. Otherwise it is in `unheard` before its first request
    and in `idle` after it.

    All are ordered by the begin of the request or of the silence, oldest first.
    """

    capacity: ClassVar[int]
    proxies: ClassVar[Sequence[Network]]
    unheard: ClassVar[dict[BoundedHttp, None]]
    idle: ClassVar[dict[BoundedHttp, None]]
    busy: ClassVar[dict[BoundedHttp, None]]
    party = ""
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.party = party_at(*(self.client or ("", 0)), self.proxies)
        self._begin_silence()
        if len(self.connections) > self.capacity:
            surplus = self._surplus()
            surplus._leave()
            surplus.transport.abort()

    def _surplus(self) -> BoundedHttp:
        """Return the connection to close for this new one."""
        num_open = Counter(each.party for each in chain(self.unheard, self.idle, self.busy))
        most = max(num_open.values())
        silent = (each for each in chain(self.unheard, self.idle) if each is not self)
        return next(each for each in chain(silent, (self,), reversed(self.busy)) if num_open[each.party] == most)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        _cancel(self._reader_timer)
        _cancel(self.timeout_keep_alive_task)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_busy() and self not in self.busy:
            self._leave()
            self.busy[self] = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy():
            self._begin_silence()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(HTTP_WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._reader_timer)
        super().resume_writing()

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _begin_silence(self) -> None:
        """Start the timer for the next request's head.

        The timer also ends a closing connection whose reader does not take the rest of a response.
        """
        self._leave()
        (self.unheard if self.cycle is None else self.idle)[self] = None
        self._head_timer = self.loop.call_later(HTTP_HEAD_TIMEOUT_S, self.transport.abort)

    def _leave(self) -> None:
        for connections in (self.unheard, self.idle, self.busy):
            connections.pop(self, None)
        _cancel(self._head_timer)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
