"""Where the API, the pages and the live events read what they show: the newest views, held in memory.

Nothing here asks a peer: a visitor costs no lookup. What needs the history is awaited. Owned by the collector's loop.
"""

from __future__ import annotations

from typing import Protocol

from swarm_node.dashboard.views import ModelDetail, NodeDetail, NodeView, Overview, RunDetail, Series


class Source(Protocol):
    """The newest views. A name that nobody has answers None: not known here, or not any more."""

    def overview(self) -> Overview: ...

    def model(self, name: str) -> ModelDetail | None: ...

    async def run(self, run: str) -> RunDetail | None:
        """By its id."""
        ...

    def nodes(self) -> tuple[NodeView, ...]:
        """By name, then peer id."""
        ...

    async def node(self, peer_id: str) -> NodeDetail | None: ...

    async def series(self, name: str, hours: float) -> Series | None:
        """The newest `hours` of a number by its name; `/api/v1/series` says which names there are."""
        ...

    async def wait_changed(self) -> None:
        """Until the collector has looked once more. Also then everything may be as it was."""
        ...
