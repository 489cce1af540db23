"""The example swarms, as a source whose histories are awaited."""

from __future__ import annotations

import inspect
from typing import Any

from dashboard_source import ExampleSource
from dashboard_swarms import example_source


class Awaited:
    """`ExampleSource` with awaitable details, whatever it has itself."""

    def __init__(self, example: ExampleSource) -> None:
        self.example = example
        self.overview, self.model, self.nodes = example.overview, example.model, example.nodes
        self.wait_changed, self.change = example.wait_changed, example.change

    async def run(self, run: str) -> Any:
        return await _had(self.example.run(run))

    async def node(self, peer_id: str) -> Any:
        return await _had(self.example.node(peer_id))

    async def series(self, name: str, hours: float) -> Any:
        return await _had(self.example.series(name, hours))


async def _had(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def swarm(num_nodes: int, *, hostile: bool = False) -> Awaited:
    return Awaited(example_source(num_nodes, hostile=hostile, now=lambda: 1_700_000_000.0))
