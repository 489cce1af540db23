"""A limit on bytes per second, as a token bucket that may go into debt. Pure: the time is an argument.

Simulated links and the limits that a node's owner sets both use it. Who may wait asks `wait_s` first; who must not
wait only reserves, and those that may wait then wait longer.

`Allowance` is what an owner allows a node to send, or to receive: payload bytes are charged with what the wire adds to
them. State belongs to the network's loop, whose clock it reads.
"""

from __future__ import annotations

import asyncio
import math


class Rate:
    """A bottleneck that serves bytes one after the other, such as a home's uplink that all its links share.

    `burst_s` is how much unused time it makes up for. Virtual timers are exact and need none; real ones come late.
    `max_debt_s` bounds how far ahead it can be reserved: bytes beyond that pass uncounted, so that those that never
    wait cannot stop those that do.
    """

    def __init__(self, bytes_per_s: float, *, burst_s: float = 0.0, max_debt_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._max_debt_s = max_debt_s
        self._free_at_s = 0.0

    def reserve(self, num_bytes: float, now_s: float) -> float:
        """Reserve the link for `num_bytes` and return the time at which the last of them will have passed."""
        # comparisons, not `min` and `max`: a simulated link asks three times for each message
        free_at_s, earliest_s, latest_s = self._free_at_s, now_s - self._burst_s, now_s + self._max_debt_s
        free_at_s = (free_at_s if free_at_s > earliest_s else earliest_s) + num_bytes / self.bytes_per_s
        self._free_at_s = free_at_s = free_at_s if free_at_s < latest_s else latest_s
        return free_at_s

    def wait_s(self, now_s: float) -> float:
        """Return how long the bytes that are reserved still take; 0 if more may pass now."""
        return max(0.0, self._free_at_s - now_s)


OVERHEAD = 1.04
"""Bytes on the wire for each byte of payload: headers of TCP and IP in Ethernet's packets, of the cipher and of the
multiplexer."""

BURST_S = 0.05
"""Unused time that a limit makes up for: several times what a timer of a busy loop is late."""

MAX_DEBT_S = 2.0
"""Time for which calls, which never wait, can keep streams waiting."""


class Allowance:
    """Bytes may pass at `bytes_per_s`; infinite: without a limit."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.is_limited = bytes_per_s < math.inf
        self._rate = Rate(bytes_per_s, burst_s=BURST_S, max_debt_s=MAX_DEBT_S)

    def charge(self, num_bytes: int) -> None:
        """Charge a payload that passes now."""
        if self.is_limited:
            self._rate.reserve(num_bytes * OVERHEAD, asyncio.get_running_loop().time())

    def wait_s(self) -> float:
        """Return how long what need not pass now has to wait; 0: not at all."""
        return self._rate.wait_s(asyncio.get_running_loop().time()) if self.is_limited else 0.0
