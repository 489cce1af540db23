"""What a member's line carries in reductions, by which the coordinator sizes its part (`coordinator.fair_shares`).

Each member measures how fast the slices of each other one arrive, and says so in its answer to the other one's vote. So
all know both how fast slices come to them and how fast their own ones get through. The slower of the two is what a
member carries, since an owner takes its part in from all and hands it out to all.

Measured is what all send at once, from the beginning of a stream to the last of its first frames: these wait for
nobody, where later ones wait until all others' have been reduced. One task owns a meter.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Collection

from swarm_protocol.training_messages import MAX_BYTES_PER_S

from swarm.network.interface import Stream
from swarm.training.allreduce.frame_inbox import MIN_AHEAD_FRAMES

NEWEST = 0.5
"""The weight of the newest measurement in the average."""
SLOWEST_BYTES_PER_S = 1.25e5
"""1 Mbit/s: a member that sends slower than this holds up the group for too long."""
MIN_BYTES = 1 << 16
"""The time of less says more about the machines than about the line between them."""


class Meter:
    """All rates are in bytes a second."""

    def __init__(self) -> None:
        self._num_others = 0
        self._latest: dict[str, float] = {}
        self._from: dict[str, float] = {}
        self._to: dict[str, float] = {}

    @property
    def bytes_per_s(self) -> int:
        """What this member carries, with as many others as lately; 0: not known."""
        ways = [rates.values() for rates in (self._from, self._to) if rates]
        # the usual one: those whose own lines are slower, or who lie, say nothing about this member's
        rate = min(map(statistics.median, ways), default=0.0)
        return int(min(rate * self._num_others, MAX_BYTES_PER_S))

    def begin(self, others: Collection[str]) -> None:
        """A reduction begins with `others`; whoever is not among them counts no more."""
        for peer, rate in self._latest.items():
            self._from[peer] = _averaged(self._from.get(peer), rate)
        self._latest.clear()
        self._num_others = len(others)
        for rates in (self._from, self._to):
            for peer in rates.keys() - set(others):
                del rates[peer]

    def arrived(self, peer: str, rate: float) -> None:
        """This reduction's slices of `peer` come at `rate`."""
        self._latest[peer] = rate

    def rate_from(self, peer: str) -> int:
        """To tell `peer` in this reduction; 0: not known."""
        return int(min(self._latest.get(peer, 0.0), MAX_BYTES_PER_S))

    def line_s(self, peer: str, num_bytes: int) -> float:
        """How long `num_bytes` may be on the way between `peer` and this member; where nothing is measured, over the
        slowest line that a run supports."""
        known = [rate for rates in (self._latest, self._from, self._to) if (rate := rates.get(peer))]
        return num_bytes / min(known, default=SLOWEST_BYTES_PER_S / max(1, self._num_others))

    def told(self, peer: str, rate: int) -> None:
        """`peer` says at which rate this member's slices came; 0: it does not know."""
        if rate:
            self._to[peer] = _averaged(self._to.get(peer), rate)


def _averaged(average: float | None, rate: float) -> float:
    return rate if average is None else average + NEWEST * (rate - average)


class MeteredStream:
    """Implements `interface.Stream`: `stream`, of which an opening and then frames are received.

    `on_rate` hears the rate of the first frames, as often as it is known better.
    """

    def __init__(self, stream: Stream, on_rate: Callable[[float], None]) -> None:
        self._stream = stream
        self._on_rate = on_rate
        self._began_s = asyncio.get_running_loop().time()
        self._num_received = self._num_bytes = 0

    async def send(self, message: bytes) -> None:
        await self._stream.send(message)

    async def receive(self) -> bytes:
        message = await self._stream.receive()
        self._num_received += 1
        if 1 < self._num_received <= 1 + MIN_AHEAD_FRAMES:
            self._measure(len(message))
        return message

    async def finish(self) -> None:
        await self._stream.finish()

    def _measure(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        seconds = asyncio.get_running_loop().time() - self._began_s
        if seconds > 0 and self._num_bytes >= MIN_BYTES:
            self._on_rate(self._num_bytes / seconds)
