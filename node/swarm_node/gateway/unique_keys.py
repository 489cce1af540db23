"""Refuses JSON bodies in which an object has a key twice: JSON leaves open which of the two values counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from swarm_node.http.field_words import shown


class UniqueKeysRoute(APIRoute):
    """A route that refuses such a body. FastAPI reports it as an error in the JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_unique(request: Request) -> Response:
            return await handle(_UniqueKeysRequest(request.scope, request.receive))

        return handle_unique


class _UniqueKeysRequest(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise json.JSONDecodeError(f"an object has the key {shown(twice)} twice", "", 0)
    return values
