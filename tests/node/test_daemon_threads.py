"""How many threads a node computes with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from swarm_node import daemon
from swarm_node.storage.home import Home


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("asked", "expected"), [(3, 3), (0, 1)])
def test_threads_asked_for_hold_in_the_loops_thread_where_a_model_was_tried_out_before(
    tmp_path: Path, asked: int, expected: int
) -> None:
    torch.set_num_threads(1)  # as a trial leaves it: this thread inherits no other number any more
    config = cast("Any", SimpleNamespace(device="cpu", probe="off", threads=asked))
    asyncio.run(daemon._machine(config, Home(tmp_path), cast("Any", SimpleNamespace(computes=True))))
    assert torch.get_num_threads() == expected
