"""The example swarms at a fixed moment."""

from __future__ import annotations

from support.dashboard_source import ExampleSource
from support.dashboard_swarms import example_source


def swarm(num_nodes: int, *, hostile: bool = False) -> ExampleSource:
    return example_source(num_nodes, hostile=hostile, now=lambda: 1_700_000_000.0)
