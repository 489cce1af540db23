"""Tests of how many threads a node computes with."""

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
def test_requested_threads_hold_in_the_loop_s_thread_after_a_trial_of_a_model(
    tmp_path: Path, asked: int, expected: int
) -> None:
    torch.set_num_threads(1)  # as a trial leaves it: this thread no longer inherits another number
    config = cast("Any", SimpleNamespace(device="cpu", probe="off", threads=asked))
    asyncio.run(daemon._machine(config, Home(tmp_path), cast("Any", SimpleNamespace(computes=True))))
    assert torch.get_num_threads() == expected
