"""What a client has learnt about servers: how far they are, which failed lately, and how many sessions it has there.

One per client, shared by its sessions; touched only from its event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from swarm_protocol.errors import PeerRefused, PeerViolation, SwarmError

from swarm.router.routing import Outlook

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
VIOLATION_BACKOFF_S = 3600.0
"""Who broke the protocol is not asked again by this client while it matters."""

LEAVING_BACKOFF_S = 60.0
"""The life of a record: when it is over, a server that left is listed no more."""

MAX_PEERS = 1024


@dataclass(slots=True)
class _Failures:
    num_in_row: int = 0
    avoid_until_s: float = 0.0


class Links:
    def __init__(self) -> None:
        self._rtt_ms: dict[str, float] = {}
        self._failures: dict[str, _Failures] = {}
        self._load: Counter[str] = Counter()

    def outlook(self, max_tokens: int, salt: str) -> Outlook:
        now_s = asyncio.get_running_loop().time()
        avoid = {peer_id for peer_id, failures in self._failures.items() if failures.avoid_until_s > now_s}
        return Outlook(rtt_ms=self._rtt_ms, load=self._load, avoid=avoid, max_tokens=max_tokens, salt=salt)

    def opened(self, peer_id: str) -> None:
        self._load[peer_id] += 1

    def closed(self, peer_id: str) -> None:
        self._load[peer_id] -= 1
        if not self._load[peer_id]:
            del self._load[peer_id]

    def worked(self, peer_id: str, wire_ms: float | None) -> None:
        """A step came back; `wire_ms` of it were not the server's compute or queue. None: too large to tell the RTT."""
        self._failures.pop(peer_id, None)
        if wire_ms is None:
            return
        known = self._rtt_ms.pop(peer_id, wire_ms)
        self._rtt_ms[peer_id] = known + 0.1 * (wire_ms - known)
        if len(self._rtt_ms) > MAX_PEERS:
            del self._rtt_ms[next(iter(self._rtt_ms))]

    def failed(self, peer_id: str, error: SwarmError) -> None:
        """Avoid the peer: as long as it asked, else twice as long as the last time."""
        failures = self._failures.pop(peer_id, _Failures())
        failures.num_in_row += 1
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (failures.num_in_row - 1))
        if isinstance(error, PeerViolation):
            backoff_s = VIOLATION_BACKOFF_S
        elif isinstance(error, PeerRefused):
            backoff_s = error.retry_after_s or LEAVING_BACKOFF_S
        failures.avoid_until_s = asyncio.get_running_loop().time() + backoff_s
        self._failures[peer_id] = failures
        if len(self._failures) > MAX_PEERS:
            del self._failures[next(iter(self._failures))]
