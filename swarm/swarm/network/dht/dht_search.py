"""One search in the DHT: who is known so far, who has been asked for what, and whom to ask next. Pure.

Kademlia's node lookup (Maymounkov and Mazieres 2002, section 2.3) for several keys at once: a node that is near to
several is asked once. Deviation: all of the nearest are asked at the same time, not three at a time, so that a search
costs as many timeouts as it is deep, not as many as there are dead.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import islice

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope

from swarm.network.dht.routing_table import node_id_of, to_id
from swarm.network.multiaddr import dialable

WIDTH = 10
"""Nodes asked a key: twice the replicas, because two peers need not agree on which nodes are nearest."""

MAX_CALLS = 100
"""Of one search for each key; a liar can name peers without end, each nearer than the last."""


MAX_ADDRS = 3 * limits.MAX_CONTACT_ADDRS
"""Of one peer: what some name for it, so that a liar among them hides nothing."""

MAX_RECORDS_PER_KEY = WIDTH * limits.MAX_RECORDS_PER_KEY
"""As if each of the nearest held others: a liar can name accomplices without end, each with records of its own."""


class Search:
    def __init__(self, keys: Sequence[bytes], own_peer_id: str) -> None:
        # of each key the peers, each behind its distance, nearest first: a liar can name thousands
        self._ranked: dict[bytes, list[tuple[int, str]]] = {key: [] for key in keys}
        self._own_peer_id = own_peer_id
        self._asked: set[tuple[str, bytes]] = set()
        self._num_asked = 0
        self._dropped: set[str] = set()
        self._addrs: dict[str, tuple[str, ...]] = {}
        self.peers: set[str] = set()
        self.answered: set[str] = set()
        self.records: dict[tuple[str, str], Envelope] = {}  # by subject and signer
        self._num_records: Counter[str] = Counter()

    @property
    def keys(self) -> tuple[bytes, ...]:
        """What is searched for."""
        return tuple(self._ranked)

    def meet(self, peers: Iterable[str], suspects: Container[str]) -> None:
        """All but this node, those that were dropped, and `suspects`."""
        for peer_id in peers:
            if peer_id in self.peers or peer_id == self._own_peer_id:
                continue
            if peer_id not in self._dropped and peer_id not in suspects:
                self.peers.add(peer_id)
                for key, ranked in self._ranked.items():
                    insort(ranked, _placed(peer_id, key))

    def note(self, peer_id: str, addrs: Iterable[str]) -> None:
        """A node names `addrs` for `peer_id`. They are tried beside those that others named."""
        known = self._addrs.get(peer_id, ())
        self._addrs[peer_id] = tuple(dict.fromkeys((*known, *dialable(addrs))))[:MAX_ADDRS]

    def addrs_of(self, peer_id: str) -> tuple[str, ...]:
        """What nodes have named for `peer_id` so far."""
        return self._addrs.get(peer_id, ())

    def drop(self, peer_id: str) -> None:
        """It did not answer."""
        self._dropped.add(peer_id)
        if peer_id in self.peers:
            self.peers.remove(peer_id)
            for key, ranked in self._ranked.items():
                del ranked[bisect_left(ranked, _placed(peer_id, key))]

    def left_out(self, peer_id: str, keys: Iterable[bytes]) -> None:
        """It had no room for these in its answer, and is to be asked again."""
        self._asked.difference_update((peer_id, key) for key in keys)

    def take_in(self, envelope: Envelope) -> None:
        """Of a subject and signer the record issued last counts. What is beyond the bound is left out."""
        signed = (envelope.subject, envelope.peer_id)
        known = self.records.get(signed)
        if known is None:
            if self._num_records[envelope.subject] >= MAX_RECORDS_PER_KEY:
                return
            self._num_records[envelope.subject] += 1
        if known is None or known.issued_at < envelope.issued_at:
            self.records[signed] = envelope

    def nearest(self, key: bytes, count: int) -> list[str]:
        """Of those that answered: a liar may have named the others, and there may be nobody of their names."""
        return list(islice((peer_id for _, peer_id in self._ranked[key] if peer_id in self.answered), count))

    def next_calls(self) -> list[tuple[str, list[bytes]]]:
        """Peers that are among the nearest of keys they have not been asked for, with as many as a request takes."""
        calls: dict[str, list[bytes]] = {}
        for key, ranked in self._ranked.items():
            for _, peer_id in ranked[:WIDTH]:
                if (peer_id, key) not in self._asked and self._num_asked < MAX_CALLS * len(self._ranked):
                    self._num_asked += 1
                    self._asked.add((peer_id, key))
                    calls.setdefault(peer_id, []).append(key)
        size = limits.MAX_FIND_KEYS
        return [(peer, keys[at : at + size]) for peer, keys in calls.items() for at in range(0, len(keys), size)]


def _placed(peer_id: str, key: bytes) -> tuple[int, str]:
    return node_id_of(peer_id) ^ to_id(key), peer_id
