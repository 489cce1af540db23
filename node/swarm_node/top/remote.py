"""A dashboard's API as a source of views: it reads `/api/v1/overview`, and then the events of `/api/v1/events`.

One task, `follow`, owns it. While the dashboard does not answer, the last view stays and is marked as stale. Answers
are validated against the views and limited in size; unknown fields of a newer dashboard are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError
from swarm_protocol.errors import PeerError, PeerUnreachable, PeerViolation

from swarm_node.dashboard.views import ModelDetail, NodeDetail, NodeView, Overview, RunDetail, Series, View

ViewT = TypeVar("ViewT", bound=View)

ASK_TIMEOUT_S = 10.0
SILENT_S = 25.0
"""Time without data on the stream, whose heartbeat comes every 10 s, after which the connection counts as lost."""

RETRY_S = 2.0
MAX_ANSWER_BYTES = 16 * 2**20
PAGE_NODES = 5000


class NodePage(View):
    """A page of `/api/v1/nodes`, which is a bare list there."""

    nodes: tuple[NodeView, ...]


class DashboardClient:
    """A `dashboard.views.ViewSource` over HTTP.

    Models and nodes are asked for when they are looked at, and come later.
    """

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        """`client` is the caller's to close; `url` the dashboard's, without `/api/v1`."""
        self._client = client
        self._url = url.rstrip("/")
        self._overview: Overview | None = None
        self._lost = ""
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._asked: set[str] = set()  # names of models; "" are the nodes
        self._had_at: dict[str, float] = {}  # what was asked for, by the overview that it belongs to
        self._models: dict[str, ModelDetail | None] = {}
        self._nodes: tuple[NodeView, ...] = ()

    async def start(self) -> None:
        """Fetch the first overview. Raises PeerError if there is no dashboard."""
        found = await self._get("overview", Overview)
        if found is None:
            raise self._no_dashboard("it answered 404")
        self._overview = found

    async def follow(self) -> None:
        """Keep the views fresh until cancelled. Call `start` first."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name="dashboard events")
            tasks.create_task(self._fetch_asked(), name="dashboard details")

    # --- the source ---------------------------------------------------------------------------------------------------

    def overview(self) -> Overview:
        assert self._overview is not None, "start comes first"
        return self._overview.model_copy(update={"stale": self._lost}) if self._lost else self._overview

    def model(self, name: str) -> ModelDetail | None:
        self._ask(name)
        return self._models.get(name)

    def nodes(self) -> tuple[NodeView, ...]:
        self._ask("")
        return self._nodes

    async def run(self, run: str) -> RunDetail | None:
        """Raises PeerError."""
        return await self._get(f"runs/{_quoted(run)}", RunDetail)

    async def node(self, peer_id: str) -> NodeDetail | None:
        """Raises PeerError."""
        return await self._get(f"nodes/{_quoted(peer_id)}", NodeDetail)

    async def series(self, name: str, hours: float) -> Series | None:
        """Raises PeerError."""
        return await self._get(f"series?name={_quoted(name)}&hours={hours:g}", Series)

    async def wait_changed(self) -> None:
        await self._changed.wait()

    async def fetch(self) -> None:
        """Fetch what was requested until now. Raises PeerError."""
        asked, self._asked = self._asked, set()
        for name in asked:
            assert self._overview is not None
            self._had_at[name] = self._overview.at
            if name:
                self._models[name] = await self._get(f"models/{_quoted(name)}", ModelDetail)
            else:
                found = await self._get(f"nodes?limit={PAGE_NODES}", NodePage, as_list_under="nodes")
                self._nodes = found.nodes if found else ()

    # --- the task -----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            try:
                async for name, data in self._events():
                    if name == "overview":
                        self._overview, self._lost = _parsed(data, Overview, self._url), ""
                        self._tell()
            except PeerError as error:
                self._lost = f"connection lost: {error.message}"
                self._tell()
            # a stream that ended well is opened again: a dashboard ends each after a while
            await asyncio.sleep(RETRY_S)

    async def _fetch_asked(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.fetch()
            except PeerError as error:
                self._lost = f"connection lost: {error.message}"
            self._tell()

    def _ask(self, name: str) -> None:
        if self._overview is not None and self._had_at.get(name) != self._overview.at:
            self._asked.add(name)
            self._wanted.set()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    async def _get(self, path: str, kind: type[ViewT], *, as_list_under: str = "") -> ViewT | None:
        """Fetch one view; None for what the dashboard does not know. A list is read as an object's field."""
        url = f"{self._url}/api/v1/{path}"
        try:
            async with self._client.stream("GET", url, timeout=ASK_TIMEOUT_S, follow_redirects=True) as answer:
                data = await _bounded(answer, self._url)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._no_dashboard(_told(error)) from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        if answer.status_code != httpx.codes.OK:
            raise self._no_dashboard(f"it answered {answer.status_code}")
        return _parsed(b'{"%s": %s}' % (as_list_under.encode(), data) if as_list_under else data, kind, self._url)

    async def _events(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield names and data of the server-sent events. Raises PeerError."""
        url, timeout = f"{self._url}/api/v1/events", httpx.Timeout(ASK_TIMEOUT_S, read=SILENT_S)
        try:
            async with self._client.stream("GET", url, timeout=timeout, follow_redirects=True) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise self._no_dashboard(f"it answered {answer.status_code}")
                buffer = b""
                async for piece in answer.aiter_bytes():
                    *whole, buffer = (buffer + piece.replace(b"\r", b"")).split(b"\n\n")
                    if len(buffer) > MAX_ANSWER_BYTES:
                        raise _too_large(self._url)
                    for event in whole:
                        yield _event(event)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._no_dashboard(_told(error)) from error

    def _no_dashboard(self, reason: str) -> PeerUnreachable:
        return PeerUnreachable(
            f"no dashboard answers at {self._url}: {reason}",
            remedy="check --url: it is what `swarm-node dashboard` or `swarm-node gateway` printed; or give --peers",
        )


async def _bounded(answer: httpx.Response, url: str) -> bytes:
    pieces = bytearray()
    async for piece in answer.aiter_bytes():
        pieces += piece
        if len(pieces) > MAX_ANSWER_BYTES:
            raise _too_large(url)
    return bytes(pieces)


def _event(text: bytes) -> tuple[str, bytes]:
    fields: dict[bytes, list[bytes]] = {}
    for line in text.split(b"\n"):
        name, _, value = line.partition(b":")
        fields.setdefault(name, []).append(value.removeprefix(b" "))
    return b"".join(fields.get(b"event", [])).decode("utf-8", "replace"), b"\n".join(fields.get(b"data", []))


def _parsed(data: bytes, kind: type[ViewT], url: str) -> ViewT:
    try:
        return kind.model_validate_json(data, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PeerViolation(
            f"what {url} sends is no {kind.__name__}: {f'{where}: ' if where else ''}{first['msg']}"[:300],
            remedy="check --url; a dashboard of another version may need this one to be updated",
        ) from error


def _too_large(url: str) -> PeerViolation:
    return PeerViolation(f"{url} sends more than {MAX_ANSWER_BYTES} bytes", remedy="check that --url is a dashboard's")


def _told(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _quoted(name: str) -> str:
    return quote(name, safe="")
