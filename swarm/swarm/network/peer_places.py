"""Counts what peers hold of this node's room: so many for each, so many in all. Pure.

When all places are taken, a peer that holds few of them still gets one: many keys can fill the room, but not keep out a
peer that wants little. What that adds is bounded by the number of connections. State belongs to the host's loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

NUM_GUARANTEED = 4
"""Places that each peer can have, however many others hold."""

K = TypeVar("K", bound=Hashable)


class PeerPlaces(Generic[K]):
    """Counts the places that each peer holds, and says whether it may have one more."""

    def __init__(self, *, per_peer: Callable[[], int], in_all: int) -> None:
        """`per_peer` returns what holds now."""
        self._per_peer = per_peer
        self._in_all = in_all
        self._held: Counter[K] = Counter()
        self.num_held = 0

    def held_by(self, peer: K) -> int:
        """Return how many places a peer holds."""
        return self._held[peer]

    def has_room(self, peer: K) -> bool:
        """Return whether a peer may have one more."""
        held = self._held[peer]
        return held < self._per_peer() and (self.num_held < self._in_all or held < NUM_GUARANTEED)

    def take(self, peer: K) -> None:
        """Count one more, whether there is room or not."""
        self._held[peer] += 1
        self.num_held += 1

    def give_back(self, peer: K) -> None:
        self.num_held -= 1
        self._held[peer] -= 1
        if not self._held[peer]:
            del self._held[peer]

    @contextmanager
    def taken(self, peer: K) -> Iterator[bool]:
        """Hold a place while the context lasts, and yield whether there was room for it."""
        has_room = self.has_room(peer)
        self.take(peer)
        try:
            yield has_room
        finally:
            self.give_back(peer)
