"""Decides whether a node lends its machine now and when it lends again, by hours of the day and remaining monthly
traffic.

Times are arguments, in Unix seconds. Hours and months are in local time. When daylight saving time begins or ends,
windows follow the local clock: a window that begins in the skipped hour begins at the end of that hour, and a window in
the repeated hour is open twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from swarm_protocol.records import Pause

from swarm_node.formatting import PAUSES, lends_again

if TYPE_CHECKING:
    # the network's code, which the settings do not need
    from swarm_node.lending.traffic_count import MonthlyTraffic

DAY_MIN = 24 * 60
_WINDOW = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", re.ASCII)
RESERVE = 0.02
"""Share of a monthly budget that is reserved for finishing work in flight and staying in the network."""


@dataclass(frozen=True, slots=True)
class Window:
    """`[start_min, end_min)` in minutes since midnight. If the end is not after the start, it is on the next day."""

    start_min: int
    end_min: int

    def holds(self, minute: int) -> bool:
        if self.start_min < self.end_min:
            return self.start_min <= minute < self.end_min
        return minute >= self.start_min or minute < self.end_min

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in (self.start_min, self.end_min))


def parse_window(text: str) -> Window:
    """Parse `22:00-07:00`. Raises ValueError, whose message continues a sentence that begins with the text."""
    match = _WINDOW.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a range of hours such as 22:00-07:00")
    hours = [int(each) for each in match.groups()]
    start_min, end_min = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
    if max(hours[1], hours[3]) > 59 or start_min >= DAY_MIN or end_min > DAY_MIN:
        raise ValueError("is not a range of hours: they go from 00:00 to 24:00")
    if start_min == end_min % DAY_MIN and end_min != DAY_MIN:
        raise ValueError("is an empty range: leave the hours out to lend always")
    return Window(start_min, end_min)


def is_open(windows: Sequence[Window], at: float) -> bool:
    """Return whether the node lends at the Unix time `at`. Without windows it always lends."""
    now = datetime.fromtimestamp(at)
    return not windows or any(window.holds(now.hour * 60 + now.minute) for window in windows)


def next_change(windows: Sequence[Window], at: float) -> float | None:
    """Return when the node next starts or stops lending, or None if it never does."""
    now, first = is_open(windows, at), (int(at) // 60 + 1) * 60
    # minute by minute, because clock changes also move the hours
    minutes = range(first, first + 3 * DAY_MIN * 60, 60)
    return next((float(minute) for minute in minutes if is_open(windows, minute) != now), None)


def next_month(at: float) -> float:
    """Return when the next calendar month begins."""
    now = datetime.fromtimestamp(at)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    year, month = divmod(first.year * 12 + first.month, 12)
    return first.replace(year=year, month=month + 1).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A time in which the node lends nothing, for the reason `pause`, until the Unix time `until`."""

    pause: Pause
    until: float

    def words(self, at: float) -> str:
        return f"{PAUSES[self.pause]}: {lends_again(self.until, at)}"


class Lending:
    """Decides when the node has a break. `budget_bytes` limits the traffic of a calendar month, sent plus received; 0:
    no limit."""

    def __init__(self, windows: Sequence[Window], budget_bytes: int, month: MonthlyTraffic) -> None:
        self._windows = tuple(windows)
        self.budget_bytes = budget_bytes
        self.month = month

    @property
    def is_limited(self) -> bool:
        return bool(self._windows or self.budget_bytes)

    def break_at(self, at: float) -> Break | None:
        """Return the break in which the Unix time `at` is, or None if the node lends."""
        if self.budget_bytes and self.month.num_bytes >= (1 - RESERVE) * self.budget_bytes:
            until = next_month(at)
            change = None if is_open(self._windows, until) else next_change(self._windows, until)
            return Break(pause="budget", until=change or until)
        if is_open(self._windows, at):
            return None
        change = next_change(self._windows, at)
        assert change is not None, "a window has a beginning"
        return Break(pause="hours", until=change)
