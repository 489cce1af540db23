"""The JSON API under `/api/v1`: the views, for the pages and for anyone else. Public and read-only.

`/api/v1/openapi.json` describes the API. Model names contain slashes, which may be percent-encoded.
"""

from __future__ import annotations

import asyncio
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, TypeAdapter

from swarm_node.dashboard.checkpoints import find_file
from swarm_node.dashboard.live import Live, LiveResponse
from swarm_node.dashboard.views import ModelDetail, NodeDetail, NodeView, Overview, RunDetail, Series, ViewSource
from swarm_node.formatting import shown
from swarm_node.http.http_error import ErrorBody, HttpError

MAX_NAME_CHARS = 256
"""Maximum length of a name in a request. Names in records are shorter, so a longer valid name is simply not found."""

MAX_REPEATED_CHARS = 100
"""Maximum length of a visitor's text that an error repeats."""

MAX_NODES = 5000
MAX_HOURS = 30 * 24.0

SERIES = (
    "Names: `nodes`, `tokens_per_s`, `training_tokens_per_s`, `first_token_p50_s`, `first_token_p95_s`; "
    "of each model `tokens_per_s/MODEL` and "
    "`replicas/MODEL` (of its weakest block); of each run `training_tokens_per_s/RUN` and `members/RUN`."
)
EVENTS = (
    "Server-sent events: `overview` with an Overview after each collection, about once a second; `heartbeat` with "
    "`{at}` after 10 s without another event. The other routes give details. A stream ends after at most 15 minutes."
)

Name = Annotated[str, Path(max_length=MAX_NAME_CHARS)]
_NODES = TypeAdapter(list[NodeView])
_OVERVIEW = {"$ref": "#/components/schemas/Overview"}
_HEARTBEAT = {"type": "object", "properties": {"at": {"type": "number"}}, "required": ["at"]}


def router(source: ViewSource, live: Live, checkpoints: FilePath | None = None) -> APIRouter:
    """Return all of the API's routes. `checkpoints` is the directory of the files that it offers."""
    api = Api(source, live, checkpoints)
    routes = APIRouter(prefix="/api/v1")
    for path, endpoint, model in (
        ("/overview", api.overview, Overview),
        ("/models/{name:path}", api.model, ModelDetail),
        ("/runs/{run:path}", api.run, RunDetail),
        ("/nodes", api.nodes, list[NodeView]),
        ("/nodes/{peer_id}", api.node, NodeDetail),
        ("/series", api.series, Series),
    ):
        answers: dict[int | str, dict[str, Any]] = {200: {"model": model}, **_failures(400, 404)}
        routes.add_api_route(path, endpoint, methods=["GET"], response_model=None, responses=answers)
        routes.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    items = {"oneOf": [_event("overview", _OVERVIEW), _event("heartbeat", _HEARTBEAT)]}
    events = {"text/event-stream": {"schema": {"type": "string", "description": EVENTS}, "itemSchema": items}}
    routes.add_api_route(
        "/events",
        api.events,
        methods=["GET"],
        status_code=200,
        response_class=LiveResponse,
        response_model=None,
        description=EVENTS,
        responses={200: {"content": events}, **_failures(503)},
    )
    routes.add_api_route(
        "/checkpoints/{run}/{name}",
        api.checkpoint,
        methods=["GET"],
        response_class=FileResponse,
        response_model=None,
        responses={
            200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
            206: {"description": "The range that was asked for"},
            416: {"description": "The file has no such range"},
            **_failures(400, 404),
        },
    )
    routes.add_api_route(
        "/checkpoints/{run}/{name}", api.checkpoint, methods=["HEAD"], response_model=None, include_in_schema=False
    )
    return routes


class Api:
    """Answers the routes of the JSON API from the views of `source`."""

    def __init__(self, source: ViewSource, live: Live, checkpoints: FilePath | None) -> None:
        self._source = source
        self._live = live
        self._checkpoints = checkpoints

    async def overview(self) -> Response:
        """Return the state of the whole swarm."""
        return _json(self._source.overview())

    async def model(self, name: Name) -> Response:
        """Return one model: its servers, its replicas per block, and the chains that a new session would use."""
        if (found := await self._source.model(name)) is None:
            raise _unknown("model", name, "/api/v1/overview lists the served models")
        return _json(found)

    async def run(self, run: Name) -> Response:
        """Return one training run by its id: its steps, contributors, refusals and downloadable files."""
        if (found := await self._source.run(run)) is None:
            raise _unknown("run", run, "/api/v1/overview lists the runs by their ids")
        return _json(found)

    async def nodes(
        self,
        limit: Annotated[int, Query(ge=1, le=MAX_NODES)] = 500,
        offset: Annotated[int, Query(ge=0, le=10**6)] = 0,
        state: Literal["alive", "leaving", "gone"] | None = None,
    ) -> Response:
        """Return nodes by name, including those that left within the last day."""
        found = [node for node in self._source.nodes() if state is None or node.state == state]
        return Response(_NODES.dump_json(found[offset : offset + limit]), media_type="application/json")

    async def node(self, peer_id: Name) -> Response:
        """Return one node: what its record says, and what the history has about it."""
        if (found := await self._source.node(peer_id)) is None:
            raise _unknown("node", peer_id, "/api/v1/nodes lists the nodes by their peer ids")
        return _json(found)

    async def series(
        self,
        name: Annotated[str, Query(max_length=MAX_NAME_CHARS, description=SERIES)],
        hours: Annotated[float, Query(gt=0, le=MAX_HOURS)] = 24.0,
    ) -> Response:
        """Return one number over the newest hours, evenly spaced, with null where it was unknown."""
        if (found := await self._source.series(name, hours)) is None:
            raise _unknown("series", name, "/api/v1/openapi.json lists the series")
        return _json(found)

    async def events(self) -> Response:
        return LiveResponse(self._live)

    async def checkpoint(self, run: Name, name: Name) -> Response:
        """Return a file of a run's checkpoint, whole or a range. `RunDetail.checkpoint` lists the files."""
        found = await asyncio.to_thread(find_file, self._checkpoints, run, name)
        if found is None:
            raise HttpError(404, "there is no such file to download", remedy="/api/v1/runs/RUN lists a run's files")
        return FileResponse(found, media_type="application/octet-stream", filename=found.name)


def _unknown(what: str, name: str, remedy: str) -> HttpError:
    """Return a 404 error for an unknown name."""
    return HttpError(404, f"there is no {what} {shown(name, max_chars=MAX_REPEATED_CHARS)} here", remedy=remedy)


def _json(view: BaseModel) -> Response:
    return Response(view.model_dump_json(), media_type="application/json")


def _failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody} for status in (*statuses, 429, 500)}


def _event(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one server-sent event, whose `data` is JSON."""
    encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {"type": "object", "properties": {"event": {"const": name}, "data": encoded}, "required": ["event", "data"]}
