"""Bounds what peers take of one host: slots, bytes of streams that wait unread, and how often they ask.

When all slots are taken, a peer that holds few of them still gets one (`PeerSlots`). So an attacker with many keys can
fill all slots, but cannot keep out a peer that wants few. The number of connections bounds these extra slots.

A stream's window bounds what one stream holds, but not what all streams of a peer hold, nor a message that is joined
from many pieces. So every piece is charged to `UnreadBudget` before it is allocated, and released once its message has
been taken. A stream that exceeds its peer's budget gives way. When the host's budget is exceeded, the largest stream of
the peer that `greediest` names gives way. Keys cost nothing, but addresses in many providers' networks do. So a flood,
from however many keys, displaces its own streams first, and not those of peers in other networks or of peers that hold
little.

How often something is done for one peer, and for all together, is bounded by refusal (`PeerRateLimit`) or by delay
(`PeerPace`). State belongs to the host's loop, whose clock these two read.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused

from swarm.held_counts import HeldCounts
from swarm.network.rate import Rate
from swarm.newest_items import NewestItems

K = TypeVar("K", bound=Hashable)

MAX_CALLS = 8192
"""Maximum calls of all peers that are handled at once, each in a task: as many as 32 peers may have."""

MAX_STREAMS_PER_PEER = 256
"""Maximum streams of one peer. Each takes two open files and a task. `UnreadBudget` bounds what all of them hold
unread."""

MAX_STREAMS = 4096
"""Maximum streams of all peers: those of sixteen peers with as many as one may have, or a few of each of a thousand
peers."""

NUM_GUARANTEED = 4
"""Slots that each peer can have, however many slots other peers hold."""

MAX_PACED = 4096
"""Maximum peers that `PeerPace` remembers. A peer that is forgotten has its whole burst again."""


class PeerSlots(Generic[K]):
    """Counts the slots that each peer holds, and says whether it may have one more."""

    def __init__(self, *, per_peer: Callable[[], int], in_all: int) -> None:
        """`per_peer` returns the present limit of one peer, and `in_all` is the limit of all peers."""
        self._per_peer = per_peer
        self._in_all = in_all
        self._held = HeldCounts[K]()
        self.num_held = 0

    def held_by(self, peer: K) -> int:
        """Return the number of slots that a peer holds."""
        return self._held[peer]

    def has_room(self, peer: K) -> bool:
        """Return whether a peer may have one more slot."""
        held = self._held[peer]
        return held < self._per_peer() and (self.num_held < self._in_all or held < NUM_GUARANTEED)

    def take(self, peer: K) -> None:
        """Count one more slot of a peer, whether there is room or not."""
        self._held[peer] += 1
        self.num_held += 1

    def give_back(self, peer: K) -> None:
        self.num_held -= 1
        self._held[peer] -= 1

    @contextmanager
    def taken(self, peer: K) -> Iterator[bool]:
        """Hold a slot while the context lasts if there is room for it, and yield whether there is."""
        has_room = self.has_room(peer)
        if has_room:
            self.take(peer)
        try:
            yield has_room
        finally:
            if has_room:
                self.give_back(peer)


MAX_UNARY_BYTES = 2**16
"""Maximum bytes of an answer, or of a request, over the unary connection. The libp2p daemon keeps an answer until the
peer has read it, and does not report when that is. A larger answer goes over a stream, where the peer's reading slows
this node. This much fits libp2p's own window."""

PEER_BYTES = limits.MAX_MESSAGE_BYTES + 16 * 2**20
"""Maximum unread bytes of one peer: the largest message, and four full windows beside it."""

HOST_BYTES = 512 * 2**20
"""Maximum unread bytes of all peers: full windows of 128 streams, far more than a group of sixteen needs."""

RETRY_AFTER_S = 1.0


def call_slots() -> PeerSlots[K]:
    """Return slots for the calls that a node handles at once."""
    return PeerSlots(per_peer=lambda: limits.MAX_CALLS_PER_PEER, in_all=MAX_CALLS)


def stream_slots() -> PeerSlots[K]:
    """Return slots for the streams that a node accepts."""
    return PeerSlots(per_peer=lambda: MAX_STREAMS_PER_PEER, in_all=MAX_STREAMS)


class UnreadHolder(Protocol):
    """A stream whose messages wait to be taken."""

    peer_id: str

    def give_way(self, refusal: PeerRefused) -> None:
        """Drop what is unread, tell the peer why, and accept nothing more."""


ProviderOf = Callable[[str], Hashable]
"""`provider_of(peer_id)` returns the network from which a peer is connected, or None if that is not known."""


def greediest(held: Mapping[str, int], provider_of: ProviderOf) -> str:
    """Return the peer that holds most among those of the network whose peers hold most together."""
    by_provider = Counter[Hashable]()
    for peer_id, num_bytes in held.items():
        by_provider[provider_of(peer_id)] += num_bytes
    [(provider, _)] = by_provider.most_common(1)
    return max((peer_id for peer_id in held if provider_of(peer_id) == provider), key=held.__getitem__)


class UnreadBudget:
    """Counts the bytes that wait unread, for each peer and in all, and has streams give way that exceed the budget."""

    def __init__(
        self,
        provider_of: ProviderOf = lambda _peer_id: None,
        *,
        max_peer_bytes: int = PEER_BYTES,
        max_host_bytes: int = HOST_BYTES,
    ) -> None:
        self._provider_of = provider_of
        self._max_peer_bytes = max_peer_bytes
        self._max_host_bytes = max_host_bytes
        # plain dicts: each message of a stream is charged and released once or twice
        self._held: dict[UnreadHolder, int] = {}
        self._by_peer: dict[str, int] = {}
        self.num_bytes = 0
        self.num_refused = 0  # streams that had to give way, since the start

    def charge(self, holder: UnreadHolder, num_bytes: int) -> bool:
        """Charge `num_bytes` more to `holder`. Return False if `holder` itself had to give way."""
        peer_bytes = self._add(holder, num_bytes)
        if peer_bytes <= self._max_peer_bytes and self.num_bytes <= self._max_host_bytes:
            return True
        if peer_bytes > self._max_peer_bytes:
            self._give_way(holder, f"more than {self._max_peer_bytes} bytes from one peer wait to be read")
        while self.num_bytes > self._max_host_bytes:
            peer_id = greediest(self._by_peer, self._provider_of)
            largest = max((each for each in self._held if each.peer_id == peer_id), key=self._held.__getitem__)
            self._give_way(
                largest, f"more than {self._max_host_bytes} bytes wait to be read, most of them from one network"
            )
        return holder in self._held

    def release(self, holder: UnreadHolder, num_bytes: int) -> None:
        """Release `num_bytes` of `holder` that were consumed."""
        if held_bytes := self._held.get(holder, 0):
            self._add(holder, -min(num_bytes, held_bytes))

    def drop(self, holder: UnreadHolder) -> None:
        """Release everything that a stream holds, since it has ended. Idempotent."""
        if held_bytes := self._held.get(holder, 0):
            self._add(holder, -held_bytes)

    def _give_way(self, holder: UnreadHolder, why: str) -> None:
        self.num_refused += 1
        self.drop(holder)
        holder.give_way(PeerRefused(why, remedy="send less at once", retry_after_s=RETRY_AFTER_S))

    def _add(self, holder: UnreadHolder, num_bytes: int) -> int:
        """Add `num_bytes`, and return what the holder's peer then holds."""
        peer_id = holder.peer_id
        held_bytes = self._held[holder] = self._held.get(holder, 0) + num_bytes
        peer_bytes = self._by_peer[peer_id] = self._by_peer.get(peer_id, 0) + num_bytes
        self.num_bytes += num_bytes
        if not held_bytes:
            del self._held[holder]
        if not peer_bytes:
            del self._by_peer[peer_id]
        return peer_bytes


class PeerRateLimit(Generic[K]):
    """Allows `per_peer` requests of one peer, `per_network` of one network, and `in_all` of all peers, within any
    `period_s`."""

    def __init__(
        self, *, period_s: float, per_peer: int, per_network: float = math.inf, in_all: float = math.inf
    ) -> None:
        self._period_s = period_s
        self._per_peer = per_peer
        self._per_network = per_network
        self._in_all = in_all
        self._taken: deque[tuple[float, K, Hashable]] = deque()  # each request within the last period
        self._num_taken = HeldCounts[K]()
        self._num_of_network = HeldCounts[Hashable]()

    def takes(self, peer: K, network: Hashable = None) -> bool:
        """Return whether a request of a peer is allowed now. If so, it counts."""
        now = asyncio.get_running_loop().time()
        while self._taken and self._taken[0][0] <= now - self._period_s:
            _, earlier, its_network = self._taken.popleft()
            self._num_taken[earlier] -= 1
            self._num_of_network[its_network] -= 1
        is_over = self._num_taken[peer] >= self._per_peer or self._num_of_network[network] >= self._per_network
        if is_over or len(self._taken) >= self._in_all:
            return False
        self._taken.append((now, peer, network))
        self._num_taken[peer] += 1
        self._num_of_network[network] += 1
        return True


class PeerPace(Generic[K]):
    """Delays the requests of each peer beyond `per_s` a second. Those unused within `burst_s` are made up for.

    No request waits longer than `burst_s`. For the rate to hold, a peer may have only `per_s * burst_s` under way.
    """

    def __init__(self, *, per_s: float, burst_s: float) -> None:
        self._per_s = per_s
        self._burst_s = burst_s
        self._rates = NewestItems[K, Rate](MAX_PACED)

    async def wait(self, peer: K) -> None:
        """Count a request of a peer, and wait until its turn."""
        if (wait_s := self.count(peer, 1)) > 0:
            await asyncio.sleep(wait_s)

    def count(self, peer: K, num_requests: float) -> float:
        """Count `num_requests` of a peer, and return the seconds until their turn; not above 0 if it has come."""
        if (rate := self._rates.get(peer)) is None:
            rate = Rate(self._per_s, burst_s=self._burst_s, max_debt_s=self._burst_s)
        self._rates[peer] = rate
        now_s = asyncio.get_running_loop().time()
        return rate.reserve(num_requests, now_s) - now_s
