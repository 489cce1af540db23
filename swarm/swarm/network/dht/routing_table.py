"""Whom a node of the DHT knows: Kademlia's buckets of peers by their distance to the node itself. Pure.

Source: Maymounkov and Mazieres, "Kademlia: A Peer-to-peer Information System Based on the XOR Metric" (2002), sections
2.2 and 4.1: whoever has long been there is likelier to stay than a newcomer, so a full bucket keeps whom it has, and
newcomers wait until one of these is found to be gone. That also keeps a flood of new identities from pushing out the
peers that are known.

Deviations: one bucket for each bit of distance instead of a tree of ranges, which holds the same peers; a peer that
does not answer once is gone, since it comes back with its next call. A peer's place follows from its key; still, to be
the nearest of a thousand nodes to a chosen place takes no more than some thousand keys.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache

from swarm_protocol.dht_messages import place_of

BUCKET_SIZE = 20
"""The paper's k: so many peers hardly ever all leave within an hour."""


@lru_cache(maxsize=4096)
def node_id_of(peer_id: str) -> int:
    """A peer's one place."""
    return to_id(place_of(peer_id))


def to_id(place: bytes) -> int:
    """As a number: the distance of two is their XOR."""
    return int.from_bytes(place, "big")


@dataclass(slots=True)
class _Bucket:
    """Peers at like distances; of both the one last heard of is last."""

    members: OrderedDict[str, None] = field(default_factory=OrderedDict)
    waiting: OrderedDict[str, None] = field(default_factory=OrderedDict)


class RoutingTable:
    """Of the node `peer_id`, which is not in it. For each of 256 bits BUCKET_SIZE members, and as many who wait."""

    def __init__(self, peer_id: str) -> None:
        self._own_id = node_id_of(peer_id)
        self._buckets: dict[int, _Bucket] = {}

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(peer_id for bucket in self._buckets.values() for peer_id in bucket.members)

    def __contains__(self, peer_id: str) -> bool:
        """Whether `peer_id` is a member; those who wait are not."""
        bucket = self._buckets.get((node_id_of(peer_id) ^ self._own_id).bit_length())
        return bucket is not None and peer_id in bucket.members

    def heard_of(self, peer_id: str) -> None:
        """`peer_id` has called or answered just now. It becomes a member, or waits where all places are taken."""
        distance = node_id_of(peer_id) ^ self._own_id
        if not distance:
            return
        bucket = self._buckets.setdefault(distance.bit_length(), _Bucket())
        if peer_id in bucket.members or len(bucket.members) < BUCKET_SIZE:
            bucket.members[peer_id] = None
            bucket.members.move_to_end(peer_id)
            bucket.waiting.pop(peer_id, None)
            return
        bucket.waiting[peer_id] = None
        bucket.waiting.move_to_end(peer_id)
        if len(bucket.waiting) > BUCKET_SIZE:
            bucket.waiting.popitem(last=False)

    def lost(self, peer_id: str) -> None:
        """`peer_id` did not answer. Its place goes to whoever of those waiting was heard of last."""
        bucket = self._buckets.get((node_id_of(peer_id) ^ self._own_id).bit_length())
        if bucket is None:
            return
        bucket.waiting.pop(peer_id, None)
        if peer_id not in bucket.members:
            return
        del bucket.members[peer_id]
        if bucket.waiting:
            heir, _ = bucket.waiting.popitem()
            bucket.members[heir] = None

    def doubtful(self) -> tuple[str, ...]:
        """Of each bucket the member not heard of for longest: to be pinged, since others may wait for its place, and
        searches that are not this node's own hear of it from here."""
        return tuple(next(iter(bucket.members)) for bucket in self._buckets.values() if bucket.members)

    def nearest(self, key: int, count: int) -> list[str]:
        """The `count` members nearest to `key`, nearest first; fewer if there are not as many."""
        return heapq.nsmallest(count, self.peers, key=lambda peer_id: node_id_of(peer_id) ^ key)
