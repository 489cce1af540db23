"""The demo's stages: what waits for what."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swarm_node.demo import stages
from swarm_node.demo.demo_plan import DemoPlan
from swarm_node.demo.demo_state import DemoState
from swarm_node.demo.nodes import DemoError


def test_seed_starts_while_the_run_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signing imports torch, for seconds; a seed that waited for that would start later by as much."""
    seed_starts = threading.Event()

    def sign(*_arguments: object) -> int:
        assert seed_starts.wait(10)
        return 1

    async def start(*_arguments: object) -> None:
        seed_starts.set()
        raise DemoError("this is all that the test needs")

    monkeypatch.setattr(stages, "_write_run", sign)
    monkeypatch.setattr(stages, "_start", start)
    fleet: Any = SimpleNamespace(root=tmp_path)
    reporter: Any = SimpleNamespace(stage=lambda _text: None)
    demo = stages.Demo(plan=DemoPlan(), state=DemoState(num_nodes=4), fleet=fleet, reporter=reporter)
    with pytest.raises(DemoError, match="all that the test needs"):
        asyncio.run(stages.run(demo))
