"""Budgets for the bytes of streams that wait unread in one host: for each peer, and for all together. Pure.

A stream's window bounds what one stream holds, but not what all streams of a peer hold, nor a message that is put
together from many pieces. So every piece is charged here before it is allocated, and released once its message has been
taken. A stream that exceeds its peer's budget gives way; when the host's budget is exceeded, the largest stream of the
peer that holds most gives way: a flood displaces itself, however many keys it has, and not those who hold little.
State belongs to the host's loop.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol, TypeVar

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused

PEER_BYTES = limits.MAX_MESSAGE_BYTES + 16 * 2**20
"""The largest message, and four full windows beside it."""

HOST_BYTES = 512 * 2**20
"""Maximum unread bytes of all peers: full windows of 128 streams, far more than a group of sixteen needs."""

RETRY_AFTER_S = 1.0

K = TypeVar("K")


class UnreadHolder(Protocol):
    """A stream whose messages wait to be taken."""

    peer_id: str

    def give_way(self, refusal: PeerRefused) -> None:
        """Drop what is unread, tell the peer why, and take nothing more."""


class UnreadBudget:
    """Counts the bytes that wait unread, for each peer and in all, and says which stream has to give way."""

    def __init__(self, *, max_peer_bytes: int = PEER_BYTES, max_host_bytes: int = HOST_BYTES) -> None:
        self._max_peer_bytes = max_peer_bytes
        self._max_host_bytes = max_host_bytes
        self._held: Counter[UnreadHolder] = Counter()
        self._by_peer: Counter[str] = Counter()
        self.num_bytes = 0
        self.num_refused = 0  # streams that had to give way, since the start

    def charge(self, holder: UnreadHolder, num_bytes: int) -> bool:
        """Account `num_bytes` more. False: `holder` itself has had to give way."""
        self._add(holder, num_bytes)
        if self._by_peer[holder.peer_id] > self._max_peer_bytes:
            self._give_way(holder, f"more than {self._max_peer_bytes} bytes of this peer wait to be read here")
        while self.num_bytes > self._max_host_bytes:
            peer_id, _ = self._by_peer.most_common(1)[0]
            largest = max((each for each in self._held if each.peer_id == peer_id), key=self._held.__getitem__)
            self._give_way(largest, f"more than {self._max_host_bytes} bytes wait to be read here, most of this peer")
        return holder in self._held

    def release(self, holder: UnreadHolder, num_bytes: int) -> None:
        """Release `num_bytes` that were consumed."""
        self._add(holder, -min(num_bytes, self._held[holder]))

    def drop(self, holder: UnreadHolder) -> None:
        """Forget a stream that has ended; a second time does nothing."""
        self._add(holder, -self._held[holder])

    def _give_way(self, holder: UnreadHolder, why: str) -> None:
        self.num_refused += 1
        self.drop(holder)
        holder.give_way(PeerRefused(why, remedy="send less at once", retry_after_s=RETRY_AFTER_S))

    def _add(self, holder: UnreadHolder, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        _count(self._held, holder, num_bytes)
        _count(self._by_peer, holder.peer_id, num_bytes)


def _count(counter: Counter[K], key: K, num_bytes: int) -> None:
    # with the methods of a plain dict, since this is done four times for each message
    if total := counter.get(key, 0) + num_bytes:
        counter[key] = total
    else:
        counter.pop(key, None)
