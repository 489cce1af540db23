"""A dashboard's API as a source of views: it reads `/api/v1/overview` every second, and other views when they are
shown.

One task, `follow`, owns it. While the dashboard does not answer, the last view stays and is marked as stale. Responses
are validated against the views and limited in size. Unknown fields of a newer dashboard are ignored.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError
from swarm_protocol.errors import PeerError, PeerUnreachable, PeerViolation, printable_line

from swarm_node.dashboard.views import ModelDetail, NodeDetail, NodeView, Overview, RunDetail, Series

T = TypeVar("T")

ASK_TIMEOUT_S = 10.0
POLL_S = 1.0
MAX_ANSWER_BYTES = 16 * 2**20
PAGE_NODES = 5000
_TOO_LARGE = re.compile(rb"[0-9]{300}")
"""A number that a float cannot hold, which no view could show. No text of a view has as many digits."""
NOT_SWARM = "the server there has no Swarm dashboard"
_REASONS: Sequence[tuple[type[BaseException] | tuple[type[BaseException], ...], str]] = (
    (ssl.SSLError, "TLS failed; if the server uses plain HTTP, write http:// instead of https://"),
    (socket.gaierror, "the name server knows no such host"),
    (ConnectionRefusedError, "the connection was refused; nothing listens at that address and port"),
    (httpx.ConnectTimeout, "the host does not answer"),
    ((httpx.TimeoutException, TimeoutError), f"the server there did not answer within {ASK_TIMEOUT_S:.0f} s"),
    (httpx.RemoteProtocolError, "the server there does not speak HTTP"),
)


class DashboardClient:
    """A `dashboard.views.ViewSource` over HTTP. The list of nodes is fetched after each overview, if it was shown
    since the last fetch."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        """The caller closes `client`. `url` is the dashboard's, without `/api/v1`."""
        self._client = client
        self._url = url.rstrip("/")
        self._overview: Overview | None = None
        self._lost = ""
        self._changed = asyncio.Event()
        self._nodes: tuple[NodeView, ...] = ()
        self._shows_nodes = True  # so that the first list is there before it is shown

    async def start(self) -> None:
        """Fetch the first overview. Raises PeerError if there is no dashboard."""
        found = await self._get("overview", Overview)
        if found is None:
            raise self._no_dashboard(NOT_SWARM)
        self._overview = found

    async def follow(self) -> None:
        """Keep the views fresh until cancelled. Call `start` first."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.start()
                if self._shows_nodes:
                    self._nodes = await self._get(f"nodes?limit={PAGE_NODES}", tuple[NodeView, ...]) or ()
                    self._shows_nodes = False
                self._lost = ""
            except PeerError as error:
                self._lost = f"connection lost: {error.message}"
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def overview(self) -> Overview:
        assert self._overview is not None, "start comes first"
        return self._overview.model_copy(update={"stale": self._lost}) if self._lost else self._overview

    async def model(self, name: str) -> ModelDetail | None:
        """Fetch one model. Raises PeerError."""
        return await self._get(f"models/{_quoted(name)}", ModelDetail)

    def nodes(self) -> tuple[NodeView, ...]:
        self._shows_nodes = True
        return self._nodes

    async def run(self, run_id: str) -> RunDetail | None:
        """Fetch one run. Raises PeerError."""
        return await self._get(f"runs/{_quoted(run_id)}", RunDetail)

    async def node(self, peer_id: str) -> NodeDetail | None:
        """Fetch one node. Raises PeerError."""
        return await self._get(f"nodes/{_quoted(peer_id)}", NodeDetail)

    async def series(self, name: str, hours: float) -> Series | None:
        """Fetch the newest `hours` of a number. Raises PeerError."""
        return await self._get(f"series?name={_quoted(name)}&hours={hours:g}", Series)

    async def wait_changed(self) -> None:
        await self._changed.wait()

    async def _get(self, path: str, kind: type[T]) -> T | None:
        """Fetch a view, or return None if the dashboard does not know it."""
        url = f"{self._url}/api/v1/{path}"
        try:
            # the client's own limit is one for each piece, and a server may send a byte now and then
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                self._client.stream("GET", url, timeout=ASK_TIMEOUT_S, follow_redirects=True) as answer,
            ):
                data = bytearray()
                async for piece in answer.aiter_bytes():
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        message = f"{self._url} sends more than {MAX_ANSWER_BYTES} bytes"
                        raise PeerViolation(message, remedy="check that --url is a dashboard's")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise self._no_dashboard(_reason(error)) from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        if answer.status_code != httpx.codes.OK:
            raise self._no_dashboard(f"the server answered with status {answer.status_code}")
        return _parsed(data, kind, self._url)

    def _no_dashboard(self, reason: str) -> PeerUnreachable:
        return PeerUnreachable(
            f"no dashboard answers at {self._url}: {reason}",
            remedy="give --url the address that `swarm-node dashboard` or `swarm-node gateway` printed, or use --peers",
        )


def _reason(error: Exception) -> str:
    """Say why a request failed: the HTTP library's own text names no host, and often no cause."""
    causes = list(_causes(error))
    for kind, reason in _REASONS:
        if any(isinstance(cause, kind) for cause in causes):
            return reason
    return next(filter(None, map(printable_line, str(error).splitlines())), type(error).__name__)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__


def _parsed(data: bytearray, kind: type[T], url: str) -> T:
    remedy = "check --url; if it is a dashboard's, update the older of the two programs"
    if _TOO_LARGE.search(data):
        raise PeerViolation(f"{url} does not answer as a dashboard: it gives a number that is too large", remedy=remedy)
    try:
        return TypeAdapter(kind).validate_json(data, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = printable_line(".".join(map(str, first["loc"])))  # may hold a name that the server gave
        raise PeerViolation(
            f"{url} does not answer as a dashboard: {f'{where}: ' if where else ''}{first['msg']}"[:300],
            remedy=remedy,
        ) from error


def _quoted(name: str) -> str:
    return quote(name, safe="")
