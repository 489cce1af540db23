"""Counts a node's traffic: what it has sent and received in this month, and how fast bytes go now.

    HOME/traffic.json   {"unit": "byte", "months": {"2026-11": …}}

`MonthlyTraffic` counts over restarts: `keep_counting` has it write the file, and a node that is killed forgets what
came since. The file holds the last few months, so that a clock that is wrong for a while, as of a machine that has just
started, has no month counted anew. If it is broken, the month is, with a warning.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from datetime import datetime
from pathlib import Path

from swarm.network.rate import OVERHEAD
from swarm.network.traffic import Traffic
from swarm_protocol.checks import check_int
from swarm_protocol.limits import MAX_TRAFFIC_BYTES

from swarm_node.storage.home import JsonMemory

COUNT_S = 5.0
SAVE_S = 30.0
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
        self._saving = threading.Lock()  # what is saved at the end waits for a save that is under way

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
