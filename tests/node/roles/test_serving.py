"""The steps that a node reports while it starts to serve: in order, and once only."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from swarm.router.placement import PlacementDecision
from swarm.serving.server.capability import VolunteerOptions
from swarm.testing import virtual_time
from swarm_node.events.emitter import Emitter
from swarm_node.node import StartupSteps
from swarm_node.roles.serving import ModelServing
from swarm_node.roles.volunteer import VolunteerRole
from swarm_node.shutdown import Shutdown


@pytest.mark.parametrize("numbered", [True, False])
def test_serving_reports_its_blocks_before_it_loads_them(numbered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    emitter = Emitter(json=False, err=err)
    node = MagicMock(work_end=Shutdown(), emitter=emitter, steps=StartupSteps(emitter, VolunteerRole.num_steps))
    node.network.network_id = "test"

    def volunteer(*_: object, options: VolunteerOptions, on_choice: Any, on_decision: Any, **__: object) -> AsyncMock:
        server = MagicMock(start_block=12, end_block=20, sessions=(), num_tokens=0)
        server.record.num_blocks, server.record.revision = 32, "ab"

        async def start() -> None:
            await asyncio.to_thread(options.fetch_blocks, 15, 16)  # the time of a measurement
            decision = PlacementDecision(start=12, end=20, reason="its blocks were given")
            on_choice(decision)
            await asyncio.to_thread(options.fetch_blocks, 12, 20)
            on_decision(decision)
            on_decision(PlacementDecision(start=0, end=8, reason="it moved"))
            asyncio.get_running_loop().call_later(0.01, node.work_end.request, "done")

        return AsyncMock(start=start, failure=None, server=server)

    monkeypatch.setattr("swarm_node.roles.serving.SpanPlacer", volunteer)
    monkeypatch.setattr("swarm_node.roles.serving._options", lambda *_: VolunteerOptions())
    asyncio.run(ModelServing(node, Path("tiny"), "tiny", numbered=numbered).until_leaving())
    steps = [
        "[1/4] takes: blocks 12:20 of tiny: its blocks were given",
        "[2/4] weights: everything is here already",
        "[3/4] warm-up: 8 blocks are loaded and measured",
        "[4/4] serving: open for sessions",
    ]
    assert err.getvalue().splitlines() == [
        "finding and loading blocks of tiny",
        *(steps if numbered else []),
        "● serving blocks 12:20 of tiny: its blocks were given",
        "● serving blocks 0:8 of tiny: it moved",
        "SERVING blocks 12:20 of 32, 0 tok/s",
    ]


def test_serving_goes_on_while_the_server_moves_and_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without memory for both spans has no record meanwhile, and loading takes longer than a status
    is valid.
    """
    err = io.StringIO()
    node = MagicMock(work_end=Shutdown(), emitter=Emitter(json=False, err=err))
    node.network.network_id = "test"

    def volunteer(*_: object, on_decision: Any, **__: object) -> AsyncMock:
        server = MagicMock(start_block=12, end_block=20, sessions=(), num_tokens=0)
        server.record.num_blocks, server.record.revision = 32, "ab"

        async def start() -> None:
            on_decision(PlacementDecision(start=12, end=20, reason="its blocks were given"))
            del server.record
            asyncio.get_running_loop().call_later(0.01, node.work_end.request, "done")

        return AsyncMock(start=start, failure=None, server=server)

    monkeypatch.setattr("swarm_node.roles.serving.SpanPlacer", volunteer)
    monkeypatch.setattr("swarm_node.roles.serving._options", lambda *_: VolunteerOptions())
    asyncio.run(ModelServing(node, Path("tiny"), "tiny", numbered=False).until_leaving())
    assert err.getvalue().splitlines()[-1] == "SERVING blocks 12:20 of 32, 0 tok/s"


def test_rate_of_a_new_server_does_not_count_the_time_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []
    node = MagicMock(work_end=Shutdown(), emitter=MagicMock())
    node.network.network_id = "test"

    def volunteer(*_: object, **__: object) -> AsyncMock:
        server = MagicMock(start_block=12, end_block=20, sessions=(), num_tokens=0)

        async def start() -> None:
            await asyncio.sleep(600)
            asyncio.get_running_loop().call_later(0.5, setattr, server, "num_tokens", 40)
            asyncio.get_running_loop().call_later(2.5, end)

        def end() -> None:
            shown.append(node.activity.serving.tokens_per_s)
            node.work_end.request("done")

        return AsyncMock(start=start, failure=None, server=server)

    monkeypatch.setattr("swarm_node.roles.serving.SpanPlacer", volunteer)
    monkeypatch.setattr("swarm_node.roles.serving._options", lambda *_: VolunteerOptions())
    virtual_time.run(ModelServing(node, Path("tiny"), "tiny", numbered=False).until_leaving())
    assert shown == [20.0]
