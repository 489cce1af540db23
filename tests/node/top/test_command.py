"""Tests of how long `top` waits when it reads the network itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from swarm.testing import virtual_time
from swarm_node import network_join
from swarm_node.dashboard import collector
from swarm_node.settings.config import Config
from swarm_node.top import command


class Collector:
    """Sees a node and its run at once, and the run's file after `file_s` seconds."""

    def __init__(self, file_after_s: int) -> None:
        self.seconds_left = file_after_s

    def overview(self) -> Any:
        return SimpleNamespace(num_nodes=1, runs=[SimpleNamespace(name=None if self.seconds_left else "story")])

    async def wait_changed(self) -> None:
        await asyncio.sleep(1.0)
        self.seconds_left -= 1


@pytest.mark.parametrize(
    ("with_files", "file_after_s", "waited_s"), [(True, 3, 3.0), (False, 3, 0.0), (True, 1000, command.FILES_S)]
)
def test_single_view_waits_for_the_files_of_runs_for_a_short_time(
    monkeypatch: pytest.MonkeyPatch, with_files: bool, file_after_s: int, waited_s: float
) -> None:
    @asynccontextmanager
    async def visiting(_config: Config) -> AsyncIterator[Any]:
        yield SimpleNamespace(traffic=SimpleNamespace(peer_paths=None)), None

    @asynccontextmanager
    async def running_collector(*_arguments: object) -> AsyncIterator[Collector]:
        yield Collector(file_after_s)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with command._direct(Config(), with_files=with_files):
            assert loop.time() - began_s == pytest.approx(waited_s)

    monkeypatch.setattr(network_join, "visiting", visiting)
    monkeypatch.setattr(collector, "running_collector", running_collector)
    virtual_time.run(main())
