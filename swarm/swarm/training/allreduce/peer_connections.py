"""Measures the connections among the members of a reduction, and finds out whether a member is still there.

Each member measures how fast the slices of each other member arrive, and reports it in its answer to that member's
vote. So every member knows how fast slices reach it and how fast its own slices reach others. The lower of these two
rates is its bandwidth, since an owner receives its part from all members and sends the result to all. The coordinator
sizes the parts by bandwidth (`parts.fair_shares`).

The measurement runs while all members send at once, from the opening of a stream to the last of its first frames. These
frames are sent without waiting, while later ones wait until earlier ones have been reduced.

A process that is stopped, or cut off without a word, keeps its connections for minutes. A call that every member
answers at once distinguishes such a process from a slow one.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, SwarmError

from swarm.network.interface import Network, Stream
from swarm.training.allreduce.parts import MIN_AHEAD_FRAMES
from swarm.training.run.methods import Methods

NEWEST = 0.5
"""The weight of the newest measurement in the average."""
SLOWEST_MEMBER_BYTES_PER_S = 1.25e5
"""The slowest connection that a run supports, 1 Mbit/s: a slower member holds up the group for too long."""
MIN_BYTES = 1 << 16
"""Minimum bytes of a measurement: the time of fewer says more about the machines than about the connection between
them."""
QUIET_S = 1.0
"""Seconds after which a member that has sent nothing is asked whether it is there."""
SILENT_S = 4.0
"""A member that does not answer a small call within these seconds, plus the time of the bytes queued before the answer,
counts as gone: it is left out of the next attempt, and may return in a later one. Busy machines on bad links answer
within this time."""


class BandwidthMeter:
    """Measures this member's bandwidth over the reductions it takes part in. The limit that the node's operator has
    set, `max_bytes_per_s`, caps it. All rates are in bytes per second. One task owns this object."""

    def __init__(self, max_bytes_per_s: float = math.inf) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._num_others = 0
        self._latest: dict[str, float] = {}
        self._from: dict[str, float] = {}
        self._to: dict[str, float] = {}

    @property
    def bytes_per_s(self) -> int:
        """This member's bandwidth with as many other members as in the latest reduction; before the first reduction,
        the limit; 0 if it is unknown."""
        ways = [rates.values() for rates in (self._from, self._to) if rates]
        # the median is taken because members that lie, or whose own connections are slower, say nothing about this
        # member
        rates = [statistics.median(way) * self._num_others for way in ways]
        known = [rate for rate in (*rates, self._max_bytes_per_s) if rate < math.inf]
        return int(min(*known, limits.MAX_LINK_BYTES_PER_S)) if known else 0

    @property
    def latest_rates(self) -> Mapping[str, float]:
        """The rates at which the slices of each member arrived in the latest reduction, by peer."""
        return self._latest

    def begin(self, others: Collection[str]) -> None:
        """Begin a reduction with `others`, and forget the rates of all other peers."""
        for peer, rate in self._latest.items():
            self._from[peer] = _averaged(self._from.get(peer), rate)
        self._latest.clear()
        self._num_others = len(others)
        for rates in (self._from, self._to):
            for peer in rates.keys() - set(others):
                del rates[peer]

    def measured(self, peer: str, rate: float) -> None:
        """Record that the slices of `peer` arrive at `rate` in this reduction."""
        self._latest[peer] = rate

    def reported(self, peer: str, rate: int) -> None:
        """Record that `peer` received this member's slices at `rate`, which is 0 if `peer` does not know it."""
        if rate:
            self._to[peer] = _averaged(self._to.get(peer), rate)

    def rate_from(self, peer: str) -> int:
        """Return the rate to report to `peer` for this reduction; 0 if it is unknown."""
        return int(min(self._latest.get(peer, 0.0), limits.MAX_LINK_BYTES_PER_S))

    def transfer_s(self, peer: str, num_bytes: int) -> float:
        """Return how many seconds `num_bytes` may take between `peer` and this member. Until a reduction has measured
        the connection, the slowest one that a run supports is assumed."""
        known = [rate for rates in (self._from, self._to) if (rate := rates.get(peer))]
        if not known:
            return num_bytes / (SLOWEST_MEMBER_BYTES_PER_S / max(1, self._num_others))
        return num_bytes / min(*known, self._latest.get(peer, math.inf))


def _averaged(average: float | None, rate: float) -> float:
    return rate if average is None else average + NEWEST * (rate - average)


class MeteredStream:
    """Implements `interface.Stream` over `stream`, and measures how fast its first frames arrive.

    `on_rate` is called with the rate of the first frames, each time it is known better.
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
        if self._num_received <= MIN_AHEAD_FRAMES:
            self._measure(len(message))
        return message

    async def finish(self) -> None:
        await self._stream.finish()

    def _measure(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        seconds = asyncio.get_running_loop().time() - self._began_s
        if seconds > 0 and self._num_bytes >= MIN_BYTES:
            self._on_rate(self._num_bytes / seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerConnections:
    """Says how one member reaches the other members of a run."""

    network: Network
    methods: Methods
    meter: BandwidthMeter = field(default_factory=BandwidthMeter)

    async def answers(self, peer: str, within_s: float) -> bool:
        """Return whether `peer` answers an empty call within `within_s` seconds."""
        asked_s = asyncio.get_running_loop().time()
        try:
            await self.network.call(peer, self.methods.alive, b"", timeout_s=within_s)
            self.network.links.answered(peer, asyncio.get_running_loop().time() - asked_s)
        except (PeerTimeout, PeerUnreachable):
            return False
        except SwarmError:
            pass  # a refusal is an answer, whichever error the peer sends
        return True
