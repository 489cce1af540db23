"""What a client has learnt about servers: which failed lately, how many sessions it has there, and how far they are.

One per client, shared by its sessions; touched only from its event loop. Round trips are the membership's: the time
that a step takes says little of the client's own link, for what a chain computes goes from server to server. `measure`
has a task of its own, ended by `close`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm_protocol.errors import PeerRefused, PeerViolation, SwarmError

from swarm.network.membership import Membership
from swarm.router.routing import Outlook

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
VIOLATION_BACKOFF_S = 3600.0
"""Who broke the protocol is not asked again by this client while it matters."""

LEAVING_BACKOFF_S = 60.0
"""The life of a record: when it is over, a server that left is listed no more."""

MEASURE_S = 5.0
"""Who takes longer to answer is far."""

MAX_PEERS = 1024


@dataclass(slots=True)
class _Failures:
    num_in_row: int = 0
    avoid_until_s: float = 0.0


class Links:
    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._measuring: asyncio.Task[object] | None = None
        self._failures: dict[str, _Failures] = {}
        self._load: Counter[str] = Counter()

    async def close(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait({self._measuring})

    def measure(self, peer_ids: Iterable[str]) -> None:
        """Find out in the background how far these are, for the sessions that come; nothing while that goes on."""
        if self._measuring is None or self._measuring.done():
            measuring = self._membership.rtts_ms(list(peer_ids), timeout_s=MEASURE_S)
            self._measuring = asyncio.create_task(measuring, name="links")

    @property
    def avoid(self) -> set[str]:
        """Who failed lately."""
        now_s = asyncio.get_running_loop().time()
        return {peer_id for peer_id, failures in self._failures.items() if failures.avoid_until_s > now_s}

    @property
    def load(self) -> Mapping[str, int]:
        """Open sessions by peer."""
        return self._load

    def outlook(
        self,
        peer_ids: Iterable[str],
        max_tokens: int,
        salt: str,
        *,
        previous_peer_id: str = "",
        next_peer_id: str = "",
    ) -> Outlook:
        """For blocks of these servers whose inputs come from `previous_peer_id` and whose outputs go to the next."""
        return Outlook(
            rtt_ms=self._membership.known_rtts_ms(peer_ids),
            load=self._load,
            avoid=self.avoid,
            max_tokens=max_tokens,
            salt=salt,
            previous_peer_id=previous_peer_id,
            next_peer_id=next_peer_id,
        )

    def opened(self, peer_id: str) -> None:
        self._load[peer_id] += 1

    def closed(self, peer_id: str) -> None:
        self._load[peer_id] -= 1
        if not self._load[peer_id]:
            del self._load[peer_id]

    def worked(self, peer_id: str) -> None:
        """Something came back."""
        self._failures.pop(peer_id, None)

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
