"""The record DHT: hivemind's Kademlia node (its RPCs, routing table and storage) over our unary lane.

Uses `DHTProtocol` and not `DHTNode`, whose searches leave workers waiting for ever, serve what they cached after it was
replaced, and ban a peer for hours after a long partition. The search here belongs to its caller: it ends with it, and
with its deadline. Names on the wire carry the network id, so the DHTs of two networks never mix, whatever seeds they
share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PContext, PeerID
from swarm_protocol.envelope import Envelope

from swarm.network.libp2p_host import Host
from swarm.network.libp2p_unary import RemoteLaneError
from swarm.network.record_validator import RecordStorage, RecordValidator, dht_expiration, pack

NUM_REPLICAS = 5
"""Records outlive this many less one simultaneous deaths, until their owner refreshes them."""

SEARCH_WIDTH = 10
"""Nodes asked a key: twice the replicas, because two peers need not agree on which nodes are nearest."""

MAX_CALLS = 100
"""Of one search; a liar can name peers without end, each nearer than the last."""

NUM_PARALLEL_CALLS = 16
RPC_TIMEOUT_S = 3.0

SUSPECT_S = 5.0
"""A peer that did not answer is left out of searches for so long, so that each death costs one timeout, not many."""


@lru_cache(maxsize=4096)
def node_id_of(peer_id: str) -> DHTID:
    """A peer's one place in the DHT follows from its key, so nobody can move next to a record to hide it."""
    return DHTID.generate(source=peer_id)


class LaneTransport:
    """What hivemind's DHT asks of its `P2P`, on top of our lane."""

    def __init__(self, host: Host, prefix: str) -> None:
        self.peer_id = PeerID.from_base58(host.peer_id)
        self._host = host
        self._prefix = prefix

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Callable[[Any, P2PContext], Awaitable[Any]],
        input_protobuf_type: Any,
        *,
        stream_input: bool = False,
        stream_output: bool = False,
        balanced: bool = False,
    ) -> None:
        assert not any((stream_input, stream_output, balanced))

        async def answer(peer_id: str, request: bytes) -> bytes:
            context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=PeerID.from_base58(peer_id))
            try:
                response = await handler(input_protobuf_type.FromString(request), context)
            except Exception:  # hivemind meets malformed requests with asserts and parser errors of all kinds
                return b""  # which no caller takes for an answer
            encoded: bytes = response.SerializeToString()
            return encoded

        await self._host.serve(self._prefix + name, answer)

    async def call_protobuf_handler(self, peer_id: PeerID, name: str, request: Any, output_protobuf_type: Any) -> Any:
        response = await self._host.call(peer_id.to_base58(), self._prefix + name, request.SerializeToString())
        if not response:
            raise RemoteLaneError("the peer's DHT failed")
        return output_protobuf_type.FromString(response)


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtCounts:
    """`num_records` are held here for everyone, `num_refused` were offered since the start and not in order, and
    `num_peers` are in the routing table."""

    num_records: int
    num_refused: int
    num_peers: int


class RecordDht:
    def __init__(self, protocol: DHTProtocol, validator: RecordValidator) -> None:
        self._protocol = protocol
        self._validator = validator
        self._suspects: dict[PeerID, float] = {}

    @classmethod
    async def create(cls, host: Host, prefix: str, validator: RecordValidator) -> RecordDht:
        """Raises PeerUnreachable if the daemon ends meanwhile."""
        protocol = await DHTProtocol.create(
            LaneTransport(host, prefix),
            node_id_of(host.peer_id),
            bucket_size=20,
            depth_modulo=5,
            num_replicas=NUM_REPLICAS,
            wait_timeout=RPC_TIMEOUT_S,
            parallel_rpc=NUM_PARALLEL_CALLS,
            record_validator=validator,
        )
        # one storage for both: an entry of the cache would hide all the other records of its key
        protocol.storage = protocol.cache = RecordStorage()
        return cls(protocol, validator)

    def peers(self) -> tuple[str, ...]:
        """Everyone in the routing table."""
        return tuple(peer.to_base58() for peer in self._protocol.routing_table.peer_id_to_uid)

    @property
    def counts(self) -> DhtCounts:
        """As of now; of records also those that have expired and are not cleared away yet."""
        held = self._protocol.storage.data.values()
        return DhtCounts(
            num_records=sum(len(each.value.data) for each in held if isinstance(each.value, DictionaryDHTValue)),
            num_refused=self._validator.num_refused,
            num_peers=len(self.peers()),
        )

    async def ping(self, peer_id: str) -> bool:
        """Make `peer_id` and this node known to each other."""
        return await self._protocol.call_ping(PeerID.from_base58(peer_id)) is not None

    async def refresh(self) -> None:
        """Meet the nodes nearest to this one: who has searched for itself can be found by all others."""
        await self._search([self._protocol.node_id])

    async def store(self, envelope: Envelope) -> bool:
        """Place `envelope` with the nodes nearest to its key. False: no other node took it."""
        key = DHTID.generate(source=envelope.subject)
        value, drop_at = pack(envelope.to_bytes()), dht_expiration(envelope.issued_at)
        # the neighbour of the key has the same nearest nodes, and no records that would be sent along
        search = await self._search([DHTID(int(key) ^ 1)])
        nearest = search.nearest(DHTID(int(key) ^ 1), NUM_REPLICAS)
        own_distance = self._protocol.node_id.xor_distance(key)
        if len(nearest) < NUM_REPLICAS or own_distance < nearest[-1].xor_distance(key):
            self._protocol.storage.store_subkey(key, envelope.peer_id, value, drop_at)
        answers = await asyncio.gather(
            *(
                self._protocol.call_store(
                    search.peers[node], keys=[key], values=[value], expiration_time=drop_at, subkeys=[envelope.peer_id]
                )
                for node in nearest
            )
        )
        return any(answer and answer[0] for answer in answers)

    async def find(self, keys: Sequence[str]) -> tuple[list[Envelope], bool]:
        """The newest record of each key and signer, expired ones included, and whether any node was there to ask."""
        ids = {DHTID.generate(source=key): key for key in keys}
        search = await self._search(list(ids))
        newest: dict[tuple[str, str], Envelope] = {}
        for key, value in [*search.found, *self._held(ids)]:
            for envelope in self._envelopes(key, value):
                place = (envelope.subject, envelope.peer_id)
                if place not in newest or newest[place].issued_at < envelope.issued_at:
                    newest[place] = envelope
        return list(newest.values()), search.num_answers > 0 or not search.peers

    def _held(self, keys: Iterable[DHTID]) -> Iterable[tuple[DHTID, Any]]:
        for key in keys:
            held = self._protocol.storage.get(key)
            if held is not None:
                yield key, held.value

    def _envelopes(self, key: DHTID, value: Any) -> Iterable[Envelope]:
        if not isinstance(value, DictionaryDHTValue):
            return
        for subkey, (packed, expiration_time) in value.items():
            record = DHTRecord(key.to_bytes(), pack(subkey), packed, expiration_time)
            envelope = self._validator.envelope(record)
            if envelope is not None:
                yield envelope

    async def _search(self, keys: Sequence[DHTID]) -> _Search:
        """Ask the nearest nodes of every key, and whom they name, until the nearest of all have been asked."""
        search = _Search(keys, self._protocol.node_id)
        now = asyncio.get_running_loop().time()
        self._suspects = {peer: until for peer, until in self._suspects.items() if until > now}
        for key in keys:
            neighbors = self._protocol.routing_table.get_nearest_neighbors(
                key, SEARCH_WIDTH, exclude=self._protocol.node_id
            )
            search.meet(dict(neighbors).values(), self._suspects)
        async with asyncio.TaskGroup() as calls:
            running: set[asyncio.Task[None]] = set()
            while True:
                for node, wanted in search.next_calls():
                    running.add(calls.create_task(self._ask(search, search.peers[node], wanted)))
                if not running:
                    return search
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    async def _ask(self, search: _Search, peer: PeerID, keys: list[DHTID]) -> None:
        answer = await self._protocol.call_find(peer, keys)
        if not answer:
            search.drop(node_id_of(peer.to_base58()))
            self._suspects[peer] = asyncio.get_running_loop().time() + SUSPECT_S
            return
        search.num_answers += 1
        for key, (item, neighbors) in answer.items():
            search.meet(list(neighbors.values())[:SEARCH_WIDTH], self._suspects)
            if item is not None:
                search.found.append((key, item.value))


class _Search:
    """Who is known, and who has been asked for what."""

    def __init__(self, keys: Sequence[DHTID], own_id: DHTID) -> None:
        self._keys = keys
        self._own_id = own_id
        self._asked: set[tuple[DHTID, DHTID]] = set()
        self._dropped: set[DHTID] = set()
        self.peers: dict[DHTID, PeerID] = {}
        self.found: list[tuple[DHTID, Any]] = []
        self.num_answers = 0

    def meet(self, peers: Iterable[PeerID], suspects: Container[PeerID]) -> None:
        for peer in peers:
            node = node_id_of(peer.to_base58())
            if node != self._own_id and node not in self._dropped and peer not in suspects:
                self.peers.setdefault(node, peer)

    def drop(self, node: DHTID) -> None:
        self._dropped.add(node)
        self.peers.pop(node, None)

    def nearest(self, key: DHTID, count: int) -> list[DHTID]:
        return sorted(self.peers, key=key.xor_distance)[:count]

    def next_calls(self) -> list[tuple[DHTID, list[DHTID]]]:
        """Each node that is among the nearest of a key it has not been asked for, with all such keys."""
        calls: dict[DHTID, list[DHTID]] = {}
        for key in self._keys:
            for node in self.nearest(key, SEARCH_WIDTH):
                if (node, key) not in self._asked and len(self._asked) < MAX_CALLS * len(self._keys):
                    self._asked.add((node, key))
                    calls.setdefault(node, []).append(key)
        return list(calls.items())
