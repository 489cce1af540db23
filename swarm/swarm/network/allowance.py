"""What an owner allows a node to send, or to receive: payload bytes are charged with what the wire adds to them.

State belongs to the network's loop, whose clock it reads.
"""

from __future__ import annotations

import asyncio
import math

from swarm.network.rate import Rate

OVERHEAD = 1.04
"""Bytes on the wire for each byte of payload: headers of TCP and IP in Ethernet's packets, of the cipher and of the
multiplexer."""

BURST_S = 0.05
"""Unused time that a limit makes up for: several times what a timer of a busy loop is late."""

MAX_DEBT_S = 2.0
"""How long calls, which never wait, can keep streams waiting."""


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
