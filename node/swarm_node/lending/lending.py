"""Decides whether a node lends its machine now, and when again, from its hours and what is left of its monthly traffic.

`Lending` is asked with a time and keeps no clock; `keep_counting` is the daemon's task that feeds it from the meter. It
saves the month's traffic every SAVE_S and when the node leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.network.traffic import Traffic
from swarm_protocol.records import Pause

from swarm_node.formatting import PAUSES, lends_again
from swarm_node.lending.hours import Window, is_open, next_change
from swarm_node.lending.traffic_count import MonthlyTraffic, next_month

RESERVE = 0.02
"""The part of a monthly budget that is left for finishing work in flight, and for staying in the network."""

COUNT_S = 5.0
SAVE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """The node lends nothing now, for the reason `pause`, until `until`."""

    pause: Pause
    until: float

    def words(self, at: float) -> str:
        return f"{PAUSES[self.pause]}: {lends_again(self.until, at)}"


class Lending:
    """`budget_bytes` is the traffic of a calendar month, both ways; 0: no limit."""

    def __init__(self, windows: Sequence[Window], budget_bytes: int, month: MonthlyTraffic, traffic: Traffic) -> None:
        self._windows = tuple(windows)
        self._month = month
        self._traffic = traffic
        self.budget_bytes = budget_bytes

    @property
    def is_limited(self) -> bool:
        return bool(self._windows or self.budget_bytes)

    @property
    def month_bytes(self) -> int:
        """Return what was sent and received in this month, as of the last count."""
        return self._month.num_bytes

    def count(self, at: float) -> None:
        self._month.update(self._traffic.total_bytes, at)

    def save(self) -> None:
        """Write the count to the file. Blocks."""
        self._month.save()

    def break_at(self, at: float) -> Break | None:
        """Return the break that the node has at the time `at`; None: it lends."""
        if self.budget_bytes and self._month.num_bytes >= (1 - RESERVE) * self.budget_bytes:
            until = next_month(at)
            change = None if is_open(self._windows, until) else next_change(self._windows, until)
            return Break(pause="budget", until=change or until)
        if is_open(self._windows, at):
            return None
        change = next_change(self._windows, at)
        assert change is not None, "a window has a beginning"
        return Break(pause="hours", until=change)


async def keep_counting(lending: Lending) -> None:
    """Count until cancelled, and save every SAVE_S and at the end."""
    saved_s = -SAVE_S
    try:
        while True:
            lending.count(time.time())
            if (now_s := asyncio.get_running_loop().time()) - saved_s >= SAVE_S:
                saved_s = now_s
                await asyncio.to_thread(lending.save)
            await asyncio.sleep(COUNT_S)
    finally:
        lending.count(time.time())
        lending.save()
