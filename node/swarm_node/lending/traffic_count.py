"""Counts a node's traffic: the bytes sent and received this month, and the current rates.

    HOME/traffic.json   {"unit": "byte", "months": {"2026-11": …}}

`MonthlyTraffic` counts across restarts: `keep_counting` writes the file, and a killed node loses what it counted since.
The file keeps several months, so that a wrong clock, for example just after booting, does not reset the month's count.
If the file is damaged, the month's count is lost, with a warning.
"""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import datetime
from pathlib import Path

from swarm.network.rate import OVERHEAD
from swarm.network.traffic import Traffic
from swarm.recent_rate import RecentRate
from swarm_protocol.checks import check_int
from swarm_protocol.limits import MAX_TRAFFIC_BYTES

from swarm_node.storage.home import JsonMemory

COUNT_S = 5.0
SAVE_S = 30.0
SAMPLE_S = 2.0
WINDOW_S = 10.0
"""Rates cover the last 10 to 12 seconds, which is long enough to even out bursts."""

MAX_FILE_BYTES = 1024
MAX_MONTHS = 3
"""Months that are kept, by the time of their last count: this one, one of a wrong clock, and one to spare."""


class MonthlyTraffic:
    """Counts from a meter that only grows and starts at 0 with this object. Months are in local time."""

    def __init__(self, path: Path, at: float) -> None:
        self._memory = JsonMemory(
            path=path,
            owner=("unit", "byte"),
            key="months",
            what="the month's traffic",
            max_bytes=MAX_FILE_BYTES,
        )
        self._months = self._memory.read(_checked) or {}  # by month; the last one is the one counted last
        self._month = _month_of(at)
        self._metered_bytes = 0
        self._saving = threading.Lock()  # the final save waits for a running one

    @property
    def num_bytes(self) -> int:
        """Return the bytes counted this month."""
        return self._months.get(self._month, 0)

    def update(self, total_bytes: int, at: float) -> None:
        """Record that the meter shows `total_bytes` at the Unix time `at`. A new month starts at 0."""
        self._month = _month_of(at)
        self._months[self._month] = self._months.pop(self._month, 0) + total_bytes - self._metered_bytes
        self._metered_bytes = total_bytes
        if len(self._months) > MAX_MONTHS:
            del self._months[next(iter(self._months))]

    def save(self) -> None:
        """Write the count to disk. Blocks. A failing disk only causes a warning."""
        with self._saving:
            self._memory.keep(dict(self._months))


async def keep_counting(month: MonthlyTraffic, traffic: Traffic) -> None:
    """Count until cancelled, and save every SAVE_S and at the end."""
    saved_s = -SAVE_S
    try:
        while True:
            month.update(traffic.total_bytes, time.time())
            if (now_s := asyncio.get_running_loop().time()) - saved_s >= SAVE_S:
                saved_s = now_s
                await asyncio.to_thread(month.save)
            await asyncio.sleep(COUNT_S)
    finally:
        month.update(traffic.total_bytes, time.time())
        month.save()


def _month_of(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m}"


def _checked(months: dict[str, object]) -> dict[str, int]:
    if len(months) > MAX_MONTHS:
        raise ValueError(f"it has more than {MAX_MONTHS} months")
    return {month: check_int(num_bytes, "num_bytes", high=MAX_TRAFFIC_BYTES) for month, num_bytes in months.items()}


class LinkUse:
    """Measures the rates of a link. They include the protocol overhead, as the owner's limits do."""

    def __init__(self, traffic: Traffic, now_s: float) -> None:
        self._traffic = traffic
        self._up, self._down = RecentRate(now_s, WINDOW_S), RecentRate(now_s, WINDOW_S)

    def bytes_per_s(self, now_s: float) -> tuple[float, float]:
        """Return the rates up and down, in bytes per second."""
        up, down = self._up.per_s(self._traffic.up_bytes, now_s), self._down.per_s(self._traffic.down_bytes, now_s)
        return up * OVERHEAD, down * OVERHEAD


async def keep_sampling(use: LinkUse) -> None:
    """Sample until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        use.bytes_per_s(loop.time())
        await asyncio.sleep(SAMPLE_S)
