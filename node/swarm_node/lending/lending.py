"""Decides whether a node lends its machine now, and when again, from its hours and what is left of its monthly traffic.

`Lending` is asked with a time and keeps no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_protocol.records import Pause

from swarm_node.formatting import PAUSES, lends_again
from swarm_node.lending.hours import Window, is_open, next_change
from swarm_node.lending.traffic_count import MonthlyTraffic, next_month

RESERVE = 0.02
"""The part of a monthly budget that is left for finishing work in flight, and for staying in the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """The node lends nothing now, for the reason `pause`, until `until`."""

    pause: Pause
    until: float

    def words(self, at: float) -> str:
        return f"{PAUSES[self.pause]}: {lends_again(self.until, at)}"


class Lending:
    """`budget_bytes` is the traffic of a calendar month, both ways; 0: no limit."""

    def __init__(self, windows: Sequence[Window], budget_bytes: int, month: MonthlyTraffic) -> None:
        self._windows = tuple(windows)
        self.budget_bytes = budget_bytes
        self.month = month

    @property
    def is_limited(self) -> bool:
        return bool(self._windows or self.budget_bytes)

    def break_at(self, at: float) -> Break | None:
        """Return the break that the node has at the time `at`; None: it lends."""
        if self.budget_bytes and self.month.num_bytes >= (1 - RESERVE) * self.budget_bytes:
            until = next_month(at)
            change = None if is_open(self._windows, until) else next_change(self._windows, until)
            return Break(pause="budget", until=change or until)
        if is_open(self._windows, at):
            return None
        change = next_change(self._windows, at)
        assert change is not None, "a window has a beginning"
        return Break(pause="hours", until=change)
