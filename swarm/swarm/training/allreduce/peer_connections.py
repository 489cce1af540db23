"""The connections among the members of a reduction: how fast they are, and whether a member is still there.

Each member measures how fast the slices of each other member arrive, and reports it in its answer to that member's
vote. So every member knows how fast slices reach it and how fast its own slices reach others. The slower of the two is
its bandwidth, since an owner receives its part from all members and sends the result to all. The coordinator sizes the
parts by it (`parts.fair_shares`).

The measurement covers what all members send at once, from the opening of a stream to the last of its first frames:
these wait for nobody, while later frames wait until the former ones have been reduced.

A process that is stopped, or cut off without a word, keeps its connections for minutes. A call that every member
answers at once distinguishes it from one that is only slow.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from swarm_protocol.commit_messages import MAX_BYTES_PER_S
from swarm_protocol.errors import PeerError, PeerTimeout, PeerUnreachable

from swarm.network.interface import Network, Stream
from swarm.training.allreduce.parts import MIN_AHEAD_FRAMES
from swarm.training.run.methods import Methods

NEWEST = 0.5
"""The weight of the newest measurement in the average."""
SLOWEST_BYTES_PER_S = 1.25e5
"""1 Mbit/s: a member that sends slower than this holds up the group for too long."""
MIN_BYTES = 1 << 16
"""The time of fewer bytes says more about the machines than about the connection between them."""
QUIET_S = 1.0
"""A member that has sent nothing for this long is asked whether it is there."""
SILENT_S = 4.0
"""A member that does not answer a small call within this time, beyond what its connection is busy with, counts as gone:
it is left out of the next attempt, and may return in a later one. Busy machines on bad links answer within this."""


class BandwidthMeter:
    """Measures this member's bandwidth over the reductions it takes part in. It counts within the limit of the member's
    owner, `max_bytes_per_s`. All rates are in bytes per second. One task owns it."""

    def __init__(self, max_bytes_per_s: float = math.inf) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._num_others = 0
        self._latest: dict[str, float] = {}
        self._from: dict[str, float] = {}
        self._to: dict[str, float] = {}

    @property
    def bytes_per_s(self) -> int:
        """This member's bandwidth with as many other members as in the latest reduction; before the first, the limit; 0
        if it is unknown."""
        ways = [rates.values() for rates in (self._from, self._to) if rates]
        # the median: members whose own connections are slower, or who lie, say nothing about this member's
        rates = [statistics.median(way) * self._num_others for way in ways]
        known = [rate for rate in (*rates, self._max_bytes_per_s) if rate < math.inf]
        return int(min(*known, MAX_BYTES_PER_S)) if known else 0

    @property
    def latest_rates(self) -> Mapping[str, float]:
        """Says how fast the slices of each member arrived in the latest reduction."""
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
        """Record that `peer` received this member's slices at `rate`; 0: it does not know."""
        if rate:
            self._to[peer] = _averaged(self._to.get(peer), rate)

    def rate_from(self, peer: str) -> int:
        """Return the rate to report to `peer` for this reduction; 0 if it is unknown."""
        return int(min(self._latest.get(peer, 0.0), MAX_BYTES_PER_S))

    def transfer_s(self, peer: str, num_bytes: int) -> float:
        """Return how long `num_bytes` may travel between `peer` and this member. Until a reduction has measured it, the
        slowest connection that a run supports is assumed."""
        known = [rate for rates in (self._from, self._to) if (rate := rates.get(peer))]
        if not known:
            return num_bytes / (SLOWEST_BYTES_PER_S / max(1, self._num_others))
        return num_bytes / min(*known, self._latest.get(peer, math.inf))


def _averaged(average: float | None, rate: float) -> float:
    return rate if average is None else average + NEWEST * (rate - average)


class MeteredStream:
    """Implements `interface.Stream` over `stream`, on which frames are received from now on.

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
        except PeerError:
            pass  # a refusal is an answer
        return True
