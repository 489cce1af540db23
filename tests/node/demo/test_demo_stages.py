"""The demo's stages: which of them run at the same time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swarm_node.demo import stages
from swarm_node.demo.command import DemoPlan
from swarm_node.demo.nodes import DemoError, DemoState, NodeState


def test_seed_starts_while_the_run_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signing imports torch for seconds, which would delay a seed that waited for it."""
    seed_starts = threading.Event()

    def sign(*_arguments: object) -> int:
        assert seed_starts.wait(10)
        return 1

    async def start(*_arguments: object) -> None:
        seed_starts.set()
        raise DemoError("this is all that the test needs")

    monkeypatch.setattr(stages, "_write_run", sign)
    monkeypatch.setattr(stages, "_start", start)
    with pytest.raises(DemoError, match="all that the test needs"):
        asyncio.run(stages.run(_demo(tmp_path)))


def test_gateway_starts_while_nodes_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node waits seconds for the others' proposals, and a gateway can import its modules meanwhile."""
    gateway_starts = asyncio.Event()

    async def start(_demo: stages.Demo, name: str, *_arguments: object) -> NodeState:
        if name == "gateway":
            gateway_starts.set()
        return NodeState(name, addrs=("/ip4/127.0.0.1/tcp/1",))

    async def serve(_demo: stages.Demo) -> None:
        await asyncio.wait_for(gateway_starts.wait(), 60)
        raise DemoError("this is all that the test needs")

    async def passed(*_arguments: object) -> float:
        return 1.0

    monkeypatch.setattr(stages, "_write_run", lambda *_arguments: 1)
    monkeypatch.setattr(stages, "_start", start)
    monkeypatch.setattr(stages, "_start_volunteers", passed)
    monkeypatch.setattr(stages, "_train", passed)
    monkeypatch.setattr(stages, "_serve", serve)
    with pytest.raises(DemoError, match="all that the test needs"):
        asyncio.run(stages.run(_demo(tmp_path)))


def _demo(root: Path) -> stages.Demo:
    """Return a demo that has no processes and shows nothing."""
    fleet: Any = SimpleNamespace(root=root)
    reporter: Any = SimpleNamespace(stage=lambda _text: None, display=SimpleNamespace(note=lambda _text: None))
    return stages.Demo(plan=DemoPlan(), state=DemoState(num_nodes=4), fleet=fleet, reporter=reporter)
