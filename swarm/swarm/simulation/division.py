"""Divides the nodes of a simulation over processes. Pure.

All that do more than keep records are in the first process, where streams, runs and servers' sessions are. The others
fill up the processes, such that each has about as much to do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from swarm.simulation.scenario import NodeClass, Scenario

BUSY_WEIGHT = 6.0
"""A trainer takes about this many times the processor time of a node that only keeps records."""

MIN_DIVIDED_NODES = 2000
"""Nodes from which on a simulation is divided unless its caller says otherwise. Fewer are soon done, and a report on a
small scenario is the same on each machine."""

MIN_WINDOW_S = 0.002
"""The least latency of a simulation that is divided: its processes wait for each other once in this time."""

_GOLDEN = 0.6180339887498949


def num_processes(scenario: Scenario, asked_for: int, least_latency_s: float) -> int:
    """Return how many processes a simulation takes; `asked_for` is 0 if its caller leaves it open."""
    if least_latency_s < MIN_WINDOW_S:
        return 1
    if asked_for:
        return asked_for
    return min(2, _num_cores()) if scenario.nodes >= MIN_DIVIDED_NODES else 1


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Division:
    """Says which of `num_processes` a node belongs to. `index` is this process's."""

    scenario: Scenario
    num_processes: int = 1
    index: int = 0

    def process_of(self, number: int, kind: NodeClass) -> int:
        """Return the process of node `number`."""
        if self.num_processes == 1 or self._is_busy(kind):
            return 0
        return min(int(self._idle_place(number)), self.num_processes - 1)

    def _idle_place(self, number: int) -> float:
        """Return the place of a node that keeps records on a line that is cut at whole numbers: node by node they are
        spread over it evenly."""
        busy = sum(kind.share for kind in self.scenario.classes if self._is_busy(kind)) * BUSY_WEIGHT
        idle = sum(kind.share for kind in self.scenario.classes if not self._is_busy(kind))
        begin = min(1.0, busy * self.num_processes / (busy + idle))
        return begin + number * _GOLDEN % 1.0 * (self.num_processes - begin)

    def _is_busy(self, kind: NodeClass) -> bool:
        if kind.role == "train":
            return self.scenario.training is not None
        return kind.role != "idle" and self.scenario.model is not None
