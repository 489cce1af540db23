"""A DHT node's routing table (Kademlia's buckets of peers by distance), and the state of one search. Pure.

Source: Maymounkov and Mazieres, "Kademlia: A Peer-to-peer Information System Based on the XOR Metric" (2002), sections
2.2, 2.3 and 4.1: a peer that has been there for long is likelier to stay than a newcomer, so a full bucket keeps its
members, and newcomers wait until a member is gone. This also keeps a flood of new identities from displacing known
peers.

`crowded` returns the members to ping in buckets where candidates wait: in each bucket the one that was not heard of for
longest. Pings become rarer while members answer.

Deviations: there is one bucket for each bit of distance instead of a tree of ranges, which holds the same peers. A peer
that does not answer once is removed, since its next call adds it again. A peer's DHT id follows from its key; still,
some thousand keys are enough to be the nearest of a thousand nodes to a chosen DHT id.

`AddressBook` keeps the addresses that peers gave of themselves.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact, contact_of, dht_id_of
from swarm_protocol.envelope import Envelope

from swarm.network.multiaddr import dialable
from swarm.newest_items import NewestItems

BUCKET_SIZE = 20
"""Maximum members of a bucket, the paper's k: so many peers hardly ever all leave within an hour."""

WIDTH = 10
"""Nodes asked for a key: twice the replicas, because two peers may not agree on which nodes are nearest."""
NARROW_WIDTH = 6
"""Nodes asked for a key if only its nearest nodes are sought: those that are to store a record, and one more."""
SAMPLE_WIDTH = 3
"""Nodes asked for a sample of a key's records: two liars among them cannot hide the records that the third has."""
MAX_CALLS = 100
"""Maximum calls of one search for each key. Otherwise a liar could name peers without end, each nearer than the
last."""
MAX_ADDRS = 3 * limits.MAX_CONTACT_ADDRS
"""Maximum addresses of one peer that a search dials at once. Those that most nodes have named come first, so that liars
hide none unless they are most of the nodes that name the peer."""
MAX_RECORDS_PER_KEY = WIDTH * limits.MAX_RECORDS_PER_KEY
"""Maximum records of a key in a search, as many as if each of the nearest nodes held different ones. Otherwise liars
could send records without end."""


MIN_CROWDED_S = 10.0
MAX_CROWDED_S = 320.0
"""Time between two pings of members of one bucket in which candidates wait. It doubles while all of them answer."""


@lru_cache(maxsize=32768)
def node_id_of(peer_id: str) -> int:
    """Return a peer's DHT id as a number."""
    return to_id(dht_id_of(peer_id))


def to_id(dht_id: bytes) -> int:
    """Return a DHT id as a number; the distance between two ids is their XOR."""
    return int.from_bytes(dht_id, "big")


SUSPECT_S = 5.0
"""A peer that did not answer is left out of searches for this time, so that a dead peer costs few time-outs."""
MAX_SUSPECT_S = 160.0
"""Maximum time for which a peer is left out: other nodes may name a dead peer for minutes until they notice."""
MAX_SUSPECTS = 1024


@dataclass(slots=True)
class _Bucket:
    """Peers at similar distances. `members`, each with the time when it was last heard of, and the candidates `waiting`
    are in the order of that time. `by_id` has the members by DHT id. While candidates wait, no member is pinged before
    `calm_until_s`; `pause_s` is the pause that ends then."""

    members: dict[str, float] = field(default_factory=dict)
    by_id: dict[int, str] = field(default_factory=dict)
    waiting: NewestItems[str, None] = field(default_factory=lambda: NewestItems(BUCKET_SIZE))
    pause_s: float = MIN_CROWDED_S / 2
    calm_until_s: float = -math.inf


class RoutingTable:
    """The peers that node `peer_id` knows: for each of 256 bits of distance up to BUCKET_SIZE members, and as many
    candidates."""

    def __init__(self, peer_id: str) -> None:
        self._own_id = node_id_of(peer_id)
        self._buckets: dict[int, _Bucket] = {}
        self._bits: list[int] = []  # the keys of the buckets, nearest first

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(peer_id for bucket in self._buckets.values() for peer_id in bucket.members)

    def __contains__(self, peer_id: str) -> bool:
        """Return whether `peer_id` is a member. Candidates are not."""
        bucket = self._buckets.get((node_id_of(peer_id) ^ self._own_id).bit_length())
        return bucket is not None and peer_id in bucket.members

    @property
    def num_peers(self) -> int:
        return sum(len(bucket.members) for bucket in self._buckets.values())

    def heard_of(self, peer_id: str, now_s: float = 0.0) -> bool:
        """Note that `peer_id` has called or answered at `now_s`. It becomes a member, or waits if all places are taken.
        Return whether it is a member."""
        node_id = node_id_of(peer_id)
        bits = (node_id ^ self._own_id).bit_length()
        if not bits:
            return False
        bucket = self._buckets.get(bits)
        if bucket is None:
            bucket = self._buckets[bits] = _Bucket()
            insort(self._bits, bits)
        members = bucket.members
        if peer_id in members:
            del members[peer_id]  # the one last heard of is last
            members[peer_id] = now_s
            return True
        if len(members) < BUCKET_SIZE:
            members[peer_id], bucket.by_id[node_id] = now_s, peer_id
            bucket.waiting.pop(peer_id, None)
            return True
        bucket.waiting[peer_id] = None
        return False

    def lost(self, peer_id: str) -> None:
        """Remove `peer_id`, which did not answer. Its place goes to the candidate heard of last."""
        node_id = node_id_of(peer_id)
        bucket = self._buckets.get((node_id ^ self._own_id).bit_length())
        if bucket is None:
            return
        bucket.waiting.pop(peer_id, None)
        if peer_id not in bucket.members:
            return
        del bucket.members[peer_id], bucket.by_id[node_id]
        bucket.pause_s, bucket.calm_until_s = MIN_CROWDED_S / 2, -math.inf  # other members may be gone, too
        if bucket.waiting:
            heir, _ = bucket.waiting.popitem()
            # it was heard of before it had a place, so it is the first to be pinged
            bucket.members, bucket.by_id[node_id_of(heir)] = {heir: -math.inf} | bucket.members, heir

    def doubtful(self, turn: int, heard_before_s: float = math.inf) -> tuple[str, ...]:
        """Return, for every second bucket depending on `turn`, the member that was not heard of for longest, if that
        was before `heard_before_s`. It should be pinged: candidates may wait for its place, and this node names it to
        others."""
        buckets = (bucket for bits, bucket in self._buckets.items() if (bits + turn) % 2 == 0 and bucket.members)
        oldest = (next(iter(bucket.members.items())) for bucket in buckets)
        return tuple(peer_id for peer_id, heard_s in oldest if heard_s < heard_before_s)

    def crowded(self, now_s: float) -> tuple[str, ...]:
        """Return, for each bucket in which candidates wait and whose pause is over, the member that was not heard of
        for longest. It should be pinged: members that left silently would keep newcomers out."""
        found = []
        for bucket in self._buckets.values():
            if bucket.waiting and bucket.calm_until_s <= now_s:
                peer_id, heard_s = next(iter(bucket.members.items()))
                if heard_s > -math.inf:  # else it replaced a lost member, and the next member may be lost, too
                    bucket.pause_s = min(MAX_CROWDED_S, 2 * bucket.pause_s)
                    bucket.calm_until_s = now_s + bucket.pause_s
                if heard_s <= now_s - MIN_CROWDED_S:
                    found.append(peer_id)
        return tuple(found)

    def nearest(self, key: int, count: int) -> list[str]:
        """Return the `count` members nearest to `key`, nearest first; fewer if there are not as many.

        The members of the bucket to which `key` belongs are the nearest to it. Then come those of all buckets nearer to
        this node, together, and then those of the farther buckets, one bucket after the other.
        """
        found: list[str] = []
        for members in self._groups((key ^ self._own_id).bit_length()):
            # sorting numbers alone takes half the time of sorting pairs
            distances = sorted(map(key.__xor__, members))
            found += [members[distance ^ key] for distance in distances[: count - len(found)]]
            if len(found) >= count:
                break
        return found

    def _groups(self, own: int) -> Iterator[Mapping[int, str]]:
        """Yield groups of members by DHT id. To any key of the bucket `own`, all members of a group are nearer than
        those of the next group."""
        buckets, at = self._buckets, bisect_left(self._bits, own)
        if own in buckets:
            yield buckets[own].by_id
        nearer: dict[int, str] = {}
        for bits in self._bits[:at]:
            nearer |= buckets[bits].by_id
        yield nearer
        for bits in self._bits[at + (own in buckets) :]:
            yield buckets[bits].by_id


class Suspects:
    """Peers that did not answer. Each is left out of searches for SUSPECT_S, and for twice as long each further time,
    up to MAX_SUSPECT_S, until it answers."""

    def __init__(self) -> None:
        self._left_out = NewestItems[str, tuple[float, float]](MAX_SUSPECTS)  # the end and the length of each time

    def add(self, peer_id: str, now_s: float) -> None:
        """Note a peer that did not answer."""
        _, before_s = self._left_out.get(peer_id, (0.0, SUSPECT_S / 2))
        hold_s = min(MAX_SUSPECT_S, 2 * before_s)
        self._left_out[peer_id] = (now_s + hold_s, hold_s)

    def clear(self, peer_id: str) -> None:
        """Note a peer that has answered."""
        self._left_out.pop(peer_id, None)

    def has_called(self, peer_id: str, now_s: float) -> None:
        """Note a peer that has called. It is alive, but this node may still not reach it, so it is tried again within
        SUSPECT_S."""
        if peer_id in self._left_out:
            until_s, _ = self._left_out[peer_id]
            self._left_out[peer_id] = (min(until_s, now_s + SUSPECT_S), SUSPECT_S)

    def at(self, now_s: float) -> set[str]:
        """Return the peers that are left out now. A peer is forgotten once it was not added again for as long as it was
        left out."""
        for peer_id, (until_s, hold_s) in list(self._left_out.items()):
            if until_s + hold_s <= now_s:
                del self._left_out[peer_id]
        return {peer_id for peer_id, (until_s, _) in self._left_out.items() if until_s > now_s}


class NodeLookup:
    """The state of a search for the `width` nodes nearest to each of `keys`, and for their records."""

    def __init__(self, keys: Sequence[bytes], own_peer_id: str, width: int = WIDTH) -> None:
        # by key, pairs of distance and peer, nearest first; kept sorted, since a liar can name thousands
        self._ranked: dict[bytes, list[tuple[int, str]]] = {key: [] for key in keys}
        self._own_peer_id = own_peer_id
        self.width = width
        self._asked: set[tuple[str, bytes]] = set()
        self._num_asked = 0
        self._dropped: set[str] = set()
        self._named: dict[str, dict[str, Contact]] = {}  # the contact of a peer that each node named last
        self.peers: set[str] = set()
        self.answered: set[str] = set()
        self.num_hops: dict[str, int] = {}
        """The number of successive calls that reach each peer: one for a peer that was known before."""
        self.records: dict[tuple[str, str], Envelope] = {}  # by subject and signer
        self._num_records: Counter[str] = Counter()

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys that are searched for."""
        return tuple(self._ranked)

    def meet(self, peers: Iterable[str], suspects: Container[str], *, named_by: str = "") -> None:
        """Add peers, except this node, dropped peers and `suspects`. An empty `named_by` means that they were known
        before."""
        num_hops = self.num_hops.get(named_by, 0) + 1
        for peer_id in peers:
            if peer_id in self.peers or peer_id == self._own_peer_id:
                continue
            if peer_id not in self._dropped and peer_id not in suspects:
                self.peers.add(peer_id)
                self.num_hops[peer_id] = num_hops
                for key, ranked in self._ranked.items():
                    insort(ranked, _placed(peer_id, key))

    def spare(self, peers: Sequence[str]) -> None:
        """Add peers that have just answered another call. They count as asked."""
        self.meet(peers, ())
        self.answered.update(peers)
        self._asked.update((peer_id, key) for peer_id in peers for key in self._ranked)

    def hear(self, named: Sequence[Contact], suspects: Container[str], *, named_by: str) -> None:
        """Add the peers that a node names, as `meet` does, and their addresses beside those that other nodes named."""
        for contact in named:
            self._named.setdefault(contact.peer_id, {})[named_by] = contact
        self.meet([contact.peer_id for contact in named], suspects, named_by=named_by)

    def addrs_of(self, peer_id: str) -> tuple[str, ...]:
        """Return the addresses that nodes have named for `peer_id` in this search, those that most have named first."""
        contacts = tuple(self._named.get(peer_id, {}).values())
        if all(contact is contacts[0] for contact in contacts):  # as is usual
            return dialable(contacts[0].addrs) if contacts else ()
        num_naming = Counter(addr for contact in contacts for addr in contact.addrs)
        return dialable(addr for addr, _ in num_naming.most_common())

    def drop(self, peer_id: str) -> None:
        """Remove a peer that did not answer."""
        self._dropped.add(peer_id)
        if peer_id in self.peers:
            self.peers.remove(peer_id)
            for key, ranked in self._ranked.items():
                del ranked[bisect_left(ranked, _placed(peer_id, key))]

    def left_out(self, peer_id: str, keys: Iterable[bytes]) -> None:
        """Note that a node's answer left out `keys`, for which it is to be asked again."""
        self._asked.difference_update((peer_id, key) for key in keys)

    def take_in(self, envelope: Envelope) -> None:
        """Add a record. For each key and signer the record issued last is kept. Records of a key beyond the bound are
        dropped."""
        signed = (envelope.subject, envelope.peer_id)
        known = self.records.get(signed)
        if known is None:
            if self._num_records[envelope.subject] >= MAX_RECORDS_PER_KEY:
                return
            self._num_records[envelope.subject] += 1
        if known is None or known.issued_at < envelope.issued_at:
            self.records[signed] = envelope

    def nearest(self, key: bytes, count: int) -> list[str]:
        """Return the `count` nearest peers that have answered, since a liar may have invented the others."""
        return list(islice((peer_id for _, peer_id in self._ranked[key] if peer_id in self.answered), count))

    def most_hops(self) -> int:
        """Return the most hops, over all keys, to the nearest peer that answered."""
        return max((self.num_hops[peer_id] for key in self._ranked for peer_id in self.nearest(key, 1)), default=0)

    def next_calls(self) -> list[tuple[str, list[bytes]]]:
        """Return pairs of a peer and keys to ask it for: the keys to which it is among the nearest, and for which it
        was not asked. A request takes at most MAX_FIND_KEYS keys."""
        calls: dict[str, list[bytes]] = {}
        for key, ranked in self._ranked.items():
            for _, peer_id in ranked[: self.width]:
                if (peer_id, key) not in self._asked and self._num_asked < MAX_CALLS * len(self._ranked):
                    self._num_asked += 1
                    self._asked.add((peer_id, key))
                    calls.setdefault(peer_id, []).append(key)
        size = limits.MAX_FIND_KEYS
        return [(peer, keys[at : at + size]) for peer, keys in calls.items() for at in range(0, len(keys), size)]


def _placed(peer_id: str, key: bytes) -> tuple[int, str]:
    return node_id_of(peer_id) ^ to_id(key), peer_id


MAX_ADDRESSED = 1024
"""Maximum peers with addresses: twice the routing table of a node in a network of a million nodes."""


class AddressBook:
    """Remembers the addresses that members of the routing table gave of themselves."""

    def __init__(self) -> None:
        self._contacts = NewestItems[str, Contact](MAX_ADDRESSED)
        self._gone: set[str] = set()

    def learn(self, peer_id: str, addrs: Iterable[str]) -> None:
        """Note the addresses that `peer_id` gave of itself, in place of earlier ones. Do nothing if none can be
        dialled."""
        known = self._contacts.get(peer_id)
        if known is None or known.addrs != addrs:
            usable = dialable(addrs)[: limits.MAX_CONTACT_ADDRS]
            if not usable:
                return
            known = contact_of(peer_id=peer_id, addrs=usable)
        self._contacts[peer_id] = known

    def forget_all_but(self, peers: Container[str]) -> None:
        """Forget peers that are neither in `peers` now nor were at the last call: a peer that was just lost may still
        be dialled."""
        gone = {peer_id for peer_id in self._contacts if peer_id not in peers}
        for peer_id in gone & self._gone:
            del self._contacts[peer_id]
        self._gone = gone

    def __len__(self) -> int:
        return len(self._contacts)

    def of(self, peer_id: str) -> tuple[str, ...]:
        """Return the addresses that `peer_id` gave last; none if they are not known."""
        known = self._contacts.get(peer_id)
        return known.addrs if known is not None else ()

    def contact(self, peer_id: str) -> Contact:
        """Return the contact of `peer_id` that this node names to others."""
        return self._contacts.get(peer_id) or contact_of(peer_id=peer_id)
