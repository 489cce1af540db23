"""The dashboard's pages: HTML from the views that the API also serves, complete without JavaScript.

A page is rendered at most once a second, however many visitors request it. `static/live.js` fetches it again when a
live event says that the collector has polled. `charts` computes geometry and `wording` formats values. Owned by the
app's event loop.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from swarm.network.multiaddr import is_loopback

from swarm_node.dashboard import charts, wording
from swarm_node.dashboard.views import NodeView, RunDetail, ViewSource
from swarm_node.formatting import path_counts, plain, plural, whole_mebibytes
from swarm_node.settings.parsers import is_run_id

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

ROWS = 50
STEP_ROWS = 15
"""Rows of a table on one page. The next pages have the others."""
MAX_RENDERED = 256
"""Maximum number of rendered pages, which are kept for one second."""
MAX_QUERY_CHARS = 64
MAX_NAME_IN_URL = 512
FILTERS = (
    *("ago", "clock", "count", "doing", "duration", "effect", "iso", "loss", "named", "num_bytes", "number"),
    *("round_trip", "share", "until"),
)
"""The functions of `wording` that templates use as filters."""
SORTS: Mapping[str, Callable[[NodeView], Any]] = {
    "name": lambda node: (wording.named(node.name, node.peer_id).casefold(), node.peer_id),
    "speed": lambda node: -(node.decode_tokens_per_s or 0.0),
    "memory": lambda node: -node.memory_bytes,
    "newest": lambda node: -node.started_at,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Body:
    """A response's body, plain and compressed."""

    plain: bytes
    packed: bytes
    kind: str
    status: int = 200

    @classmethod
    def of(cls, data: bytes, kind: str, status: int = 200) -> Body:
        return cls(data, gzip.compress(data, 5, mtime=0), kind, status)

    def answer(self, request: Request) -> Response:
        packs = "gzip" in request.headers.get("accept-encoding", "")
        headers = {**HEADERS, "cache-control": "no-cache", "vary": "accept-encoding", "content-type": self.kind}
        if packs:
            headers["content-encoding"] = "gzip"
        return Response(self.packed if packs else self.plain, self.status, headers)


def static_files() -> dict[str, Body]:
    """Read all static files of the package, by name."""
    folder = resources.files("swarm_node.dashboard") / "static"
    return {
        file.name: Body.of(file.read_bytes(), KINDS[suffix])
        for file in folder.iterdir()
        if (suffix := f".{file.name.rpartition('.')[2]}") in KINDS
    }


@dataclass(frozen=True, slots=True)
class Paged(Generic[T]):
    """One page of a table: its rows, and their place among all. Earlier pages have `num_before` rows."""

    rows: Sequence[T]
    page: int
    num_pages: int
    num_before: int
    total: int


def paged(rows: Sequence[T], asked: str | None, size: int = ROWS) -> Paged[T]:
    """Return the requested page, or the nearest that exists."""
    num_pages = max(1, -(-len(rows) // size))
    page = min(max(int(asked), 1), num_pages) if asked and asked.isdecimal() and len(asked) < 7 else 1
    num_before = (page - 1) * size
    return Paged(rows[num_before : num_before + size], page, num_pages, num_before, len(rows))


Content = tuple[str, dict[str, Any]] | None
"""A template and its values. None if the object does not exist."""


def router(source: ViewSource, has_chat: bool = False) -> APIRouter:
    """Return the routes of the pages and of `/static/…`. `has_chat` means that a gateway shares the server."""
    pages = _Pages(source, has_chat=has_chat)
    routes = APIRouter()
    found = [
        ("/", pages.overview),
        ("/nodes", pages.nodes),
        ("/nodes/{name:path}", pages.node),
        ("/models/{name:path}", pages.model),
        ("/runs/{name:path}", pages.run),
        ("/glossary", pages.glossary),
        *([("/try", pages.chat)] if has_chat else []),
    ]
    for path in ("/models", "/models/", "/runs", "/runs/"):
        routes.add_route(path, section)
    for path, content in found:
        routes.add_route(path, pages.endpoint(content))
    routes.add_route("/static/{name:path}", pages.static)
    routes.add_route("/{name:path}", pages.unknown)
    return routes


async def section(request: Request) -> Response:
    """Redirect `/models` or `/runs` to that section of the overview."""
    _check_reads_pages(request)
    return RedirectResponse(f"/#{request.url.path.strip('/')}", headers=HEADERS)


@dataclass(slots=True)
class _Page:
    """The page of one address for one second. While it is rendered, only requests for this page wait."""

    rendering: asyncio.Lock = field(default_factory=asyncio.Lock)
    body: Body | None = None


class _Pages:
    """Renders the dashboard's pages from its views, and caches each for a second."""

    def __init__(self, source: ViewSource, *, has_chat: bool) -> None:
        self._source = source
        self._has_chat = has_chat
        self._templates = _environment()
        self._static = static_files()
        self._pages: dict[tuple[str, bytes], _Page] = {}
        self._second: tuple[int, float] = (0, 0.0)

    def endpoint(self, content: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            # not the URL: it leaves out tabs and line ends, so that two addresses would have one page
            page = self._fresh((request.scope["path"], request.scope["query_string"]))
            async with page.rendering:
                if page.body is None:
                    found = await content(request)
                    page.body = self._render(request, *found) if found else self._missing(request, "What you look for")
            return page.body.answer(request)

        return answer

    async def static(self, request: Request) -> Response:
        """Return a file by its name alone, so that no path can leave the directory."""
        body = self._static.get(request.path_params["name"]) or self._missing(request, "This file")
        return body.answer(request)

    async def unknown(self, request: Request) -> Response:
        """Answer 404: with a page for browsers, with JSON for programs."""
        _check_reads_pages(request)
        return self._missing(request, "This page", is_page=True).answer(request)

    def _fresh(self, address: tuple[str, bytes]) -> _Page:
        second = (int(time.monotonic()), self._source.overview().at)
        if second != self._second or len(self._pages) >= MAX_RENDERED:
            self._second = second
            self._pages = {}
        return self._pages.setdefault(address, _Page())

    def _missing(self, request: Request, what: str, *, is_page: bool = False) -> Body:
        return self._render(request, "missing.html", {"what": what, "is_page": is_page}, status=404)

    def _render(self, request: Request, template: str, values: dict[str, Any], *, status: int = 200) -> Body:
        overview, now = self._source.overview(), time.time()
        html = self._templates.get_template(template).render(
            overview=overview,
            now=now,
            age_s=max(0.0, now - overview.at),
            has_chat=self._has_chat,
            here=request.url.path,
            link=_linker(request),
            **values,
        )
        return Body.of(html.encode(errors="replace"), "text/html; charset=utf-8", status)

    async def overview(self, _request: Request) -> Content:
        join_words = self._source.overview().join_command.split()
        return "overview.html", {
            "joins_here_only": any(is_loopback(word) for word in join_words if word[0] == "/"),
            "activity": [
                (what, curve)
                for what, name in (("answered", "tokens_per_s"), ("trained", "training_tokens_per_s"))
                if (series := await self._source.series(name, 24))
                and (curve := charts.curve(series.values, from_zero=True))
            ],
        }

    async def model(self, request: Request) -> Content:
        detail = await self._source.model(_name(request))
        if detail is None:
            return None
        return "model.html", {
            "detail": detail,
            "model": detail.model,
            "servers": paged(detail.servers, request.query_params.get("page")),
        }

    async def run(self, request: Request) -> Content:
        detail = await self._source.run(_name(request))
        if detail is None:
            return None
        return "run.html", {
            "detail": detail,
            "run": detail.run,
            "join": _join_command(self._source.overview().join_command, detail),
            "loss": charts.curve(
                [step.loss for step in detail.steps],
                places=[step.outer_step for step in detail.steps],
                beside=[step.validation_loss for step in detail.steps],
            ),
            "validated": next((step for step in reversed(detail.steps) if step.validation_loss is not None), None),
            "phases": tuple((_newest(detail, "phases_s") or {}).items()),
            "bytes_per_parameter": _newest(detail, "bytes_per_parameter"),
            "steps": paged(detail.steps[::-1], request.query_params.get("steps"), STEP_ROWS),
            "people": paged(detail.contributors, request.query_params.get("people")),
            "names": {one.peer_id: one.name for one in detail.contributors},
        }

    async def nodes(self, request: Request) -> Content:
        asked = {
            "q": plain(request.query_params.get("q", ""), MAX_QUERY_CHARS),
            "state": request.query_params.get("state", ""),
            "reach": request.query_params.get("reach", ""),
            "sort": request.query_params.get("sort", "name"),
        }
        asked["sort"] = asked["sort"] if asked["sort"] in SORTS else "name"
        found = [node for node in self._source.nodes() if _matches(node, asked)]
        found.sort(key=SORTS[asked["sort"]])
        states = Counter(node.state for node in found)
        return "nodes.html", {"asked": asked, "nodes": paged(found, request.query_params.get("page")), "states": states}

    async def node(self, request: Request) -> Content:
        detail = await self._source.node(_name(request))
        if detail is None:
            return None
        return "node.html", {"detail": detail, "node": detail.node}

    async def glossary(self, _request: Request) -> Content:
        return "glossary.html", {}

    async def chat(self, _request: Request) -> Content:
        return "try.html", {}


def _check_reads_pages(request: Request) -> None:
    """Raise HTTPException 404 for a program, which then gets the error as JSON."""
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(404)


def _name(request: Request) -> str:
    return str(request.path_params["name"])[:MAX_NAME_IN_URL]


def _matches(node: NodeView, asked: Mapping[str, str]) -> bool:
    text = f"{node.name} {node.peer_id} {node.device} {' '.join(node.models)}".casefold()
    return (
        asked["q"].casefold() in text
        and asked["state"] in {"", node.state}
        and asked["reach"] in {"", node.reachability}
    )


def _join_command(join_command: str, detail: RunDetail) -> str | None:
    """Return the command that joins the run, or None if the run is not open or its id is not known to be safe in a
    shell."""
    is_open = detail.run.state in {"training", "waiting"}
    if not is_open or not is_run_id(detail.run.run):
        return None
    return f"{join_command} --run {detail.run.run}{' --invitation FILE' if detail.run.needs_invitation else ''}"


def _newest(detail: RunDetail, name: str) -> Any:
    """Return the attribute `name` of the newest step that has it, or None."""
    known = (getattr(step, name) for step in reversed(detail.steps))
    return next((value for value in known if value not in (None, {})), None)


def _linker(request: Request) -> Callable[..., str]:
    """Return a function that links to the same page with other query values, such as `link(page=2)`."""

    def link(**changed: object) -> str:
        query = {key: value[:MAX_QUERY_CHARS] for key, value in list(request.query_params.items())[:8]}
        return "?" + urlencode({**query, **{key: str(value) for key, value in changed.items()}}, errors="replace")

    return link


def _safe_url(url: str) -> str:
    """Return `url` if following it cannot run code, or ""."""
    return url if url.startswith(("/", "https://", "http://")) else ""


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("swarm_node.dashboard"),
        autoescape=True,
        auto_reload=False,  # a daemon keeps its templates while its files are replaced
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        {name: getattr(wording, name) for name in FILTERS},
        counted=plural,
        in_url=wording.in_url,
        path_counts=path_counts,
        plain=plain,
        safe_url=_safe_url,
        whole_mebibytes=whole_mebibytes,
    )
    environment.globals.update(charts=charts, wording=wording, glossary=wording.GLOSSARY)
    return environment
