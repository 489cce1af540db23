"""Counts what a home has sent and received in this calendar month, over restarts.

    HOME/traffic.json   {"month": "2026-11", "num_bytes": …}

Written every SAVE_S and when the node leaves; a node that is killed forgets what came since. If the file is broken, the
month is counted anew, with a warning. The task that owns the lending owns it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import datetime
from pathlib import Path

from swarm.network.rate import OVERHEAD
from swarm.network.traffic import Traffic
from swarm_protocol.checks import check_int
from swarm_protocol.limits import MAX_TRAFFIC_BYTES

from swarm_node.storage.home import JsonMemory

SAMPLE_S = 2.0

NUM_SAMPLES = 6
"""The rate is that of the last 10 to 12 seconds: long enough for a stream's turns to even out."""

MAX_FILE_BYTES = 1024


class MonthlyTraffic:
    """Counts from a meter whose total only grows, which is 0 when this is made. Months are those of local time."""

    def __init__(self, path: Path, at: float) -> None:
        self._path = path
        self._month = _month_of(at)
        self.num_bytes = self._memory().read(_checked) or 0
        self._metered_bytes = 0

    def update(self, total_bytes: int, at: float) -> None:
        """Note that the meter shows `total_bytes` at the time `at`. With a new month counting begins anew."""
        if (month := _month_of(at)) != self._month:
            self._month, self.num_bytes = month, 0
        self.num_bytes += total_bytes - self._metered_bytes
        self._metered_bytes = total_bytes

    def save(self) -> None:
        """Write the count to disk. Blocks. A disk that refuses is only a warning."""
        self._memory().keep(self.num_bytes)

    def _memory(self) -> JsonMemory:
        return JsonMemory(
            path=self._path,
            owner=("month", self._month),
            key="num_bytes",
            what="the month's traffic",
            max_bytes=MAX_FILE_BYTES,
        )


def next_month(at: float) -> float:
    """Return when the next calendar month begins."""
    now = datetime.fromtimestamp(at)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    year, month = divmod(first.year * 12 + first.month, 12)
    return first.replace(year=year, month=month + 1).timestamp()


def _month_of(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m}"


def _checked(num_bytes: object) -> int:
    return check_int(num_bytes, "num_bytes", high=MAX_TRAFFIC_BYTES)


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
