"""A simulated link: latency, jitter, shared bandwidth and loss, with one pipe for each direction.

A pipe behaves like one TCP connection between two peers that carries many flows (streams and calls). Bytes of one flow
stay in order, flows share the rate frame by frame, and a lost packet only delays what follows.
`memory_stream` interprets the bytes, and `memory_network` has the connections. The WAN emulator for real sockets
(`tests/support/wan_proxy.py`) uses the same pipes. Everything runs in callbacks of the loop; a pipe has no task.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from swarm.network.rate import Rate

FRAME_BYTES = 64 * 1024
"""Bytes that one flow sends in one turn: few, so that a token never waits long behind a tensor."""

OVERHEAD_BYTES = 64
"""Bytes of the headers of IP, TCP, the cipher and the multiplexer, for each message."""

PACKET_BYTES = 1460
"""Bytes of TCP's usual segment on Ethernet, the unit that is lost."""

RETRANSMIT_S = 0.2
"""Minimum delay by a lost packet: Linux's smallest retransmission time-out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """One direction between two peers. `jitter_s` is the maximum random delay beyond `latency_s`; `loss` is the
    probability that a packet is lost. Raises ValueError for impossible values."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and 0 <= self.jitter_s < math.inf):
            raise ValueError(f"latency and jitter must be finite and not negative: {self}")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth must be positive: {self}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss must be in [0, 1): {self}")


@dataclass(slots=True)
class _Delivery:
    left_bytes: int
    deliver: Callable[[], None]
    came_s: float | None = None


class Pipe:
    """One direction of a link, through the sender's uplink and the receiver's downlink."""

    def __init__(self, link: LinkModel, *, up: Rate, down: Rate, rng: Callable[[], random.Random]) -> None:
        """`rng` makes a generator of random numbers. It is called only if the link needs one, since a generator takes
        two thousand bytes."""
        self._make_rng = rng
        self._access = (up, down)
        self._flows: dict[object, deque[_Delivery]] = {}
        self._sending = False
        self.came_s = 0.0
        """The time at which the first byte of the message that is being delivered arrived."""
        self._arrivals: deque[tuple[Callable[[], None], float]] = deque()
        self._last_arrival_s = 0.0
        self._held: list[Callable[[], None]] | None = None
        self._is_closed = False
        self.set_link(link)

    def set_link(self, link: LinkModel) -> None:
        """Change the link. Bytes under way keep their arrival times."""
        self.link = link
        self._own = Rate(link.bandwidth_bytes_per_s)
        self._is_even = not (link.jitter_s or link.loss)  # without random delays

    @cached_property
    def _rng(self) -> random.Random:
        return self._make_rng()

    def put(self, flow: object, num_bytes: int, deliver: Callable[[], None]) -> None:
        """Carry a message; `deliver` is called when its last byte has arrived, in order within `flow`."""
        if self._is_closed:
            return
        num_bytes += OVERHEAD_BYTES
        loop = asyncio.get_running_loop()
        if self._sending or num_bytes > FRAME_BYTES:
            self._flows.setdefault(flow, deque()).append(_Delivery(num_bytes, deliver))
            if not self._sending:
                self._sending = True
                self._send_frames()
            return
        # a short message on an idle link, which is the usual case
        left_s, arrival_s = self._leave(num_bytes, now := loop.time())
        self._arrivals.append((deliver, now + arrival_s - left_s))
        loop.call_at(arrival_s, self._arrive)
        if left_s > now:
            self._sending = True
            loop.call_at(left_s, self._send_frames)

    def drop(self, flow: object) -> None:
        """Drop the bytes of `flow` that have not left yet, since the sender has given up."""
        self._flows.pop(flow, None)

    def hold(self) -> None:
        """Hold back every arrival from now on."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Deliver what was held back, and resume deliveries."""
        held, self._held = self._held or [], None
        self.came_s = asyncio.get_running_loop().time()
        for deliver in held:
            deliver()

    def close(self) -> None:
        """Lose everything under way, and carry nothing from now on."""
        self._is_closed = True
        self._flows.clear()
        self._arrivals = deque([(_nothing, 0.0)] * len(self._arrivals))
        self._held = None

    def _send_frames(self) -> None:
        """Send a frame of each flow in turn, each when the one before has left."""
        loop = asyncio.get_running_loop()
        while self._flows:
            left_s = self._send_frame(loop)
            if left_s > loop.time():
                loop.call_at(left_s, self._send_frames)
                return
        self._sending = False

    def _send_frame(self, loop: asyncio.AbstractEventLoop) -> float:
        """Send the next frame of the next flow and return the time at which it will have left."""
        flow, transfers = next(iter(self._flows.items()))
        del self._flows[flow]
        transfer = transfers[0]
        num_bytes = min(transfer.left_bytes, FRAME_BYTES)
        transfer.left_bytes -= num_bytes
        left_s, arrival_s = self._leave(num_bytes, now := loop.time())
        if transfer.came_s is None:
            transfer.came_s = now + arrival_s - left_s
        if not transfer.left_bytes:
            transfers.popleft()
            self._arrivals.append((transfer.deliver, transfer.came_s))
            loop.call_at(arrival_s, self._arrive)
        if transfers:
            self._flows[flow] = transfers  # at the end, so that the other flows come first
        return left_s

    def _leave(self, num_bytes: int, now: float) -> tuple[float, float]:
        """Return the times at which the last of these bytes leaves and arrives. It never arrives before earlier bytes,
        as on one TCP connection."""
        up, down = self._access
        left_s = max(up.reserve(num_bytes, now), down.reserve(num_bytes, now), self._own.reserve(num_bytes, now))
        delay_s = self.link.latency_s
        if not self._is_even:
            delay_s += self._rng.uniform(0, self.link.jitter_s)
            chance = 1 - (1 - self.link.loss) ** math.ceil(num_bytes / PACKET_BYTES)
            while self._rng.random() < chance:
                delay_s += max(RETRANSMIT_S, 2 * self.link.latency_s)
                chance = self.link.loss  # the retransmission is one packet
        self._last_arrival_s = max(self._last_arrival_s, left_s + delay_s)
        return left_s, self._last_arrival_s

    def _arrive(self) -> None:
        deliver, self.came_s = self._arrivals.popleft()
        if self._held is None:
            deliver()
        else:
            self._held.append(deliver)


def _nothing() -> None:
    """Deliver nothing, in place of a lost message."""
