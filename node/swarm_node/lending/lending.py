"""Decides whether a node lends its machine now, and when again, from its hours and what is left of its monthly traffic.

    HOME/traffic.json   {"unit": "byte", "months": {"2026-11": …}}

`MonthlyTraffic` counts what a home has sent and received in this calendar month, over restarts: the file is written
every SAVE_S and when the node leaves, and a node that is killed forgets what came since. It holds the last few months,
so that a clock that is wrong for a while, as of a machine that has just started, has no month counted anew. If it is
broken, the month is, with a warning. `Lending` is asked with a time and keeps no clock; `keep_counting` is the daemon's
task that feeds it from the meter. `LinkUse` tells how fast bytes go now.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from swarm.network.rate import OVERHEAD
from swarm.network.traffic import Traffic
from swarm_protocol.checks import check_int
from swarm_protocol.limits import MAX_TRAFFIC_BYTES
from swarm_protocol.records import Pause

from swarm_node.formatting import PAUSES, lends_again
from swarm_node.lending.hours import Window, is_open, next_change
from swarm_node.storage.home import JsonMemory

SAMPLE_S = 2.0
NUM_SAMPLES = 6
"""The rate is that of the last 10 to 12 seconds: long enough for a stream's turns to even out."""

MAX_FILE_BYTES = 1024
MAX_MONTHS = 3
"""Months that are remembered, those that were counted last: this one, one of a wrong clock, and one to spare."""


class MonthlyTraffic:
    """Counts from a meter whose total only grows, which is 0 when this is made. Months are those of local time."""

    def __init__(self, path: Path, at: float) -> None:
        self._memory = JsonMemory(
            path=path,
            owner=("unit", "byte"),
            key="months",
            what="the month's traffic",
            max_bytes=MAX_FILE_BYTES,
        )
        self._months = self._memory.read(_checked) or {}  # by month; the one that was counted last is last
        self._month = _month_of(at)
        self._metered_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return what was counted in this month."""
        return self._months.get(self._month, 0)

    def update(self, total_bytes: int, at: float) -> None:
        """Note that the meter shows `total_bytes` at the time `at`. With a new month counting begins anew."""
        self._month = _month_of(at)
        self._months[self._month] = self._months.pop(self._month, 0) + total_bytes - self._metered_bytes
        self._metered_bytes = total_bytes
        if len(self._months) > MAX_MONTHS:
            del self._months[next(iter(self._months))]

    def save(self) -> None:
        """Write the count to disk. Blocks. A disk that refuses is only a warning."""
        self._memory.keep(self._months)


def next_month(at: float) -> float:
    """Return when the next calendar month begins."""
    now = datetime.fromtimestamp(at)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    year, month = divmod(first.year * 12 + first.month, 12)
    return first.replace(year=year, month=month + 1).timestamp()


def _month_of(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m}"


def _checked(months: dict[str, object]) -> dict[str, int]:
    if len(months) > MAX_MONTHS:
        raise ValueError(f"it has more than {MAX_MONTHS} months")
    return {month: check_int(num_bytes, "num_bytes", high=MAX_TRAFFIC_BYTES) for month, num_bytes in months.items()}


class LinkUse:
    """The rates include what the wire adds to the payload, as the owner's limits do."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=NUM_SAMPLES)

    def sample(self, at_s: float) -> None:
        self._samples.append((at_s, self._traffic.up_bytes, self._traffic.down_bytes))

    def bytes_per_s(self, at_s: float) -> tuple[float, float]:
        """Return the rates up and down from the oldest sample to `at_s`; 0 before there is one."""
        if not self._samples or at_s <= self._samples[0][0]:
            return 0.0, 0.0
        since_s, up_bytes, down_bytes = self._samples[0]
        scale = OVERHEAD / (at_s - since_s)
        return (self._traffic.up_bytes - up_bytes) * scale, (self._traffic.down_bytes - down_bytes) * scale


async def keep_sampling(use: LinkUse) -> None:
    """Sample until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        use.sample(loop.time())
        await asyncio.sleep(SAMPLE_S)


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
