"""A dashboard's source that shows what a test puts in."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from swarm_node.dashboard.views import ModelDetail, NodeDetail, NodeView, Overview, RunDetail, Series


@dataclass
class ExampleSource:
    """What is put in is what it shows. `change` wakes those that wait."""

    shown: Overview
    model_details: dict[str, ModelDetail] = field(default_factory=dict)
    run_details: dict[str, RunDetail] = field(default_factory=dict)
    node_details: dict[str, NodeDetail] = field(default_factory=dict)
    all_series: dict[str, Series] = field(default_factory=dict)
    _waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    def overview(self) -> Overview:
        return self.shown

    async def model(self, name: str) -> ModelDetail | None:
        return self.model_details.get(name)

    async def run(self, run_id: str) -> RunDetail | None:
        return self.run_details.get(run_id)

    def nodes(self) -> tuple[NodeView, ...]:
        return tuple(detail.node for detail in self.node_details.values())

    async def node(self, peer_id: str) -> NodeDetail | None:
        return self.node_details.get(peer_id)

    async def series(self, name: str, hours: float) -> Series | None:
        return self.all_series.get(name)

    async def wait_changed(self) -> None:
        changed = asyncio.Event()
        self._waiting.append((asyncio.get_running_loop(), changed))
        await changed.wait()

    def change(self, **fields: object) -> None:
        """Show an overview with these fields changed, looked at now. From any thread."""
        self.shown = self.shown.model_copy(update={"at": time.time(), **fields})
        waiting, self._waiting = self._waiting, []
        for loop, changed in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)
