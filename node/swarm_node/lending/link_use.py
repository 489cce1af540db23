"""How many bytes a second a node sends and receives of late, from the totals of its traffic meter.

`LinkUse` is asked with a time and keeps no clock. `keep_sampling` is the daemon's task that feeds it.
"""

from __future__ import annotations

import asyncio
from collections import deque

from swarm.network.rate import OVERHEAD
from swarm.network.traffic import Traffic

SAMPLE_S = 2.0
NUM_SAMPLES = 6
"""The rate is that of the last 10 to 12 seconds: long enough for a stream's turns to even out."""


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
