"""The record DHT: Kademlia (Maymounkov and Mazieres 2002) over unary calls.

Puts together the parts. `routing_table` keeps the known peers, their addresses, and the order of a search
(`NodeLookup`). `known_peers` calls peers. `searches` runs searches, and remembers the nodes that they found for this
node's own records. `record_storage` holds records, and checks them (`RecordValidator`).

Names on the wire carry the network id, so the DHTs of two networks never mix, even if they share seeds.

The DHT also finds the addresses of peers, in place of go-libp2p's own DHT: each node sends its addresses with each
request for keys and each answer to one, so that the nodes near its DHT id know them.

Deviation from the paper: nodes do not pass records on. Owners publish theirs again, most of them every half minute
(`Announcer`), to the nodes that are then nearest, so a newcomer near a key soon holds the records of that key.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.dht_messages import (
    Contact,
    FindRequest,
    FindResponse,
    Found,
    StoreRequest,
    StoreResponse,
    dht_id_of,
)
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import check_peer_id

from swarm.network.dht.known_peers import WHOLE, KnownPeers, RecordTransport, StreamedCalls
from swarm.network.dht.record_storage import RecordStorage, RecordValidator
from swarm.network.dht.routing_table import NARROW_WIDTH, SAMPLE_WIDTH, WIDTH, node_id_of, to_id
from swarm.network.dht.searches import NUM_REPLICAS, RecordHolders, Searches
from swarm.network.peer_budgets import MAX_UNARY_BYTES, PeerPace

NUM_PARALLEL_CHECKS = 8
"""Maximum parallel calls that check members of the routing table. Silent members, with which a stranger can fill it,
leave most calls to searches."""

SEARCH_TIMEOUT_S = 4.0
"""Time-out of the search for the nodes that store a record. It covers one round of calls without answers, and leaves
one second of the publisher's five."""

NUM_NAMING = 2
"""Number of holders that have just stored a record and are also asked which other nodes are near its key. They are
drawn at random each time, so that a liar among them hides no newcomer for long."""

NUM_FIRST_SEARCHES = 2
SEARCH_EVERY = 5
"""This node searches for itself at its first two calls of `tend`, and then at every fifth."""

DOUBT_S = 360.0
"""A peer of the routing table is pinged if it was not heard of for this time. Searches keep the nearest ones fresh."""

MAKE_ROOM_S = 1.0
"""Time for which `make_room` pings members; no further ones are pinged after it."""

CALLS_PER_S = 50.0
BURST_S = 10.0
"""Calls of one peer that do not wait (see `PeerPace`). Honest nodes sent one other at most 31 in ten seconds."""

WHOLE_CALL_BYTES = 2**18
"""A whole answer counts as one more call for each of so many bytes, which take a millisecond."""

_HELD, _NOT_HELD = StoreResponse(held=True), StoreResponse(held=False)

_NO_ANSWER = b""
"""The answer to a malformed request. No decoder accepts it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtCounts:
    """Counts of this node's part of the DHT: `num_records` held for all nodes, `num_refused` invalid records that were
    offered since the start, `num_peers` in the routing table, and `num_addresses`, the peers whose addresses are
    known."""

    num_records: int
    num_refused: int
    num_peers: int
    num_addresses: int


class RecordDht:
    """Publishes and finds records in the network's Kademlia table, and answers other nodes that do so."""

    def __init__(
        self, host: RecordTransport, prefix: str, validator: RecordValidator, streams: StreamedCalls | None = None
    ) -> None:
        """Without `streams`, answers are not cut."""
        self._host = host
        self._prefix = prefix
        self._streams = streams
        self._validator = validator
        self.known = KnownPeers(host, prefix, streams)
        self._storage = RecordStorage(validator.now)
        self._searches = Searches(host.peer_id, self.known, validator)
        self._holders = RecordHolders(self.known.table)
        self.last_hops = 0
        """Number of successive calls by which the last `find` reached the node nearest to a key."""
        self._num_tended = 0
        self._num_refused = 0
        self._checks = asyncio.Semaphore(NUM_PARALLEL_CHECKS)
        self._pace = PeerPace[str](per_s=CALLS_PER_S, burst_s=BURST_S)
        self._chance = random.Random(host.peer_id)
        self.may_store: Callable[[str, Envelope], bool] = lambda _peer_id, _envelope: True
        """Returns whether a peer may store a record here; a private network sets it."""

    async def serve(self) -> None:
        """Start to answer other nodes. Raises PeerUnreachable if the daemon has ended."""
        if self._streams is not None:
            size = limits.MAX_FIND_REQUEST_BYTES
            await self._streams.serve_streamed(self._prefix + WHOLE, self._answer_whole, max_request_bytes=size)
        await self._host.serve(f"{self._prefix}find", self._answer_find)
        await self._host.serve(f"{self._prefix}store", self._answer_store)

    def peers(self) -> tuple[str, ...]:
        """Return all peers in the routing table."""
        return self.known.table.peers

    def contacts(self) -> tuple[Contact, ...]:
        """Return the peers in the routing table whose addresses are known."""
        found = map(self.known.book.contact, self.known.table.peers)
        return tuple(contact for contact in found if contact.addrs)

    @property
    def counts(self) -> DhtCounts:
        """Return the current counts. Records include expired ones that are not dropped yet."""
        return DhtCounts(
            num_records=self._storage.num_records,
            num_refused=self._num_refused,
            num_peers=self.known.table.num_peers,
            num_addresses=len(self.known.book),
        )

    async def ping(self, peer_id: str, addrs: Sequence[str] = ()) -> bool:
        """Call `peer_id`, dialled at `addrs` if need be, so that both know each other. Return whether it answered.

        Return False, too, if the peer id is not of the kind that nodes have.
        """
        try:
            check_peer_id(peer_id)
        except ValueError:
            return False
        return await self.known.find(peer_id, 0, FindRequest(addrs=self.known.own_addrs).to_bytes(), addrs) is not None

    async def refresh(self) -> None:
        """Search for this node's own DHT id, so that it meets the nodes nearest to it, and all others can find it."""
        await self._searches.search(
            [dht_id_of(self._host.peer_id)], NARROW_WIDTH, only_peers=True, timeout_s=SEARCH_TIMEOUT_S
        )

    async def make_room(self) -> None:
        """Ping members of the routing table for whose places newcomers wait. To be called every few seconds, since no
        peer finds the addresses of a node that is in no table."""
        loop = asyncio.get_running_loop()
        until = loop.time() + MAKE_ROOM_S
        while loop.time() < until and (peers := self.known.table.crowded(loop.time())):
            await self._check(peers)

    async def tend(self) -> None:
        """Ping doubtful members of the routing table, drop records that are due, and `refresh` if it is time. To be
        called once a minute. Each bucket is checked at every second call. A node that has been up for a while refreshes
        only at every SEARCH_EVERY-th call, since newcomers search, too, and so meet it."""
        self._storage.clear_due()
        turn, self._num_tended = self._num_tended, self._num_tended + 1
        heard_before_s = asyncio.get_running_loop().time() - DOUBT_S
        await self._check(self.known.table.doubtful(turn, heard_before_s))
        if turn % SEARCH_EVERY == 0:
            self.known.book.forget_all_but(frozenset(self.known.table.peers))
        if turn < NUM_FIRST_SEARCHES or turn % SEARCH_EVERY == 0:
            await self.refresh()

    async def _check(self, members: Sequence[str]) -> None:
        """Ping members of the routing table; those that do not answer are removed."""

        async def check(peer_id: str) -> None:
            async with self._checks:
                await self.ping(peer_id)

        await asyncio.gather(*map(check, members))

    async def store(self, envelope: Envelope) -> bool:
        """Store `envelope` with the nodes nearest to its key. Return whether most of those that answered hold it.

        The nodes of the key's last search get the record first. They count as the nearest until one of them does not
        answer, a nearer node is known, or it is time to search again.
        """
        dht_id, data = dht_id_of(envelope.subject), envelope.to_bytes()
        request = StoreRequest(record=data).to_bytes()
        holders, are_current = self._holders.of(dht_id), self._holders.are_current(dht_id)
        answers = await self._store_with(holders, request)
        if gone := set(holders) - answers.keys():
            self._holders.lose(dht_id, gone)
        # the calls to lost holders have already taken the time of a search, so the search is put off, but only once
        is_put_off = bool(gone) and len(holders) == NUM_REPLICAS
        if len(answers) > len(holders) // 2 and (are_current or is_put_off):
            self._keep_own(envelope, data, holders)
            return _is_held(answers.values())
        spared = self._chance.sample(tuple(answers), max(0, len(answers) - NUM_NAMING))
        width = NUM_REPLICAS if spared else NARROW_WIDTH
        search = await self._searches.search(
            [dht_id], width, only_peers=True, timeout_s=SEARCH_TIMEOUT_S, spared=spared
        )
        nearest = tuple(search.nearest(dht_id, NUM_REPLICAS))
        self._holders.remember(dht_id, nearest)
        self._keep_own(envelope, data, nearest)
        answers |= await self._store_with([peer for peer in nearest if peer not in answers], request)
        return _is_held(answers.values())

    def forget_holders(self) -> None:
        """Forget the nodes nearest to all keys, so that the next publications search again. They may have changed at
        once, as when a partition has healed."""
        self._holders.clear()

    async def _store_with(self, peers: Sequence[str], request: bytes) -> dict[str, StoreResponse]:
        """Return the answers by peer id, without peers that did not answer."""
        decode = StoreResponse.from_bytes
        calls = (self.known.call(peer_id, "store", request, decode) for peer_id in peers)
        answers = zip(peers, await asyncio.gather(*calls), strict=True)
        return {peer_id: answer for peer_id, answer in answers if answer is not None}

    def _keep_own(self, envelope: Envelope, data: bytes, nearest: Sequence[str]) -> None:
        """Hold the record here, too, if this node is among the NUM_REPLICAS nearest to its key."""
        number = to_id(dht_id_of(envelope.subject))
        farthest = [node_id_of(peer_id) ^ number for peer_id in nearest[NUM_REPLICAS - 1 :]]
        if not farthest or node_id_of(self._host.peer_id) ^ number < farthest[0]:
            self._storage.store(envelope, data)

    async def find(self, keys: Sequence[str], *, timeout_s: float, max_records: int = 0) -> tuple[list[Envelope], bool]:
        """Return the newest record of each key and signer, including expired ones, and whether the search is
        conclusive: False if no peer answered, and the calls to some had not failed by the deadline.

        With `max_records`, return a sample for each key that has more: SAMPLE_WIDTH nodes are asked, and others only if
        these hold no record.
        """
        dht_ids = list({dht_id_of(key): None for key in keys})
        width = SAMPLE_WIDTH if max_records else WIDTH
        search = await self._searches.search(
            dht_ids, width, only_peers=False, timeout_s=timeout_s, max_records=max_records
        )
        self.last_hops = search.most_hops()
        for dht_id in dht_ids:
            await self._searches.take_in(search, dht_id, self._storage.get(dht_id))
        return list(search.records.values()), bool(search.answered) or not search.peers

    def known_addrs(self, peer_id: str) -> Sequence[str]:
        """Return the addresses that `peer_id` gave this node itself; none if they are not known."""
        return self.known.book.of(peer_id)

    def find_addrs(self, peer_id: str) -> AsyncGenerator[Sequence[str], None]:
        """Yield addresses of `peer_id`: those that it gave this node, then those that it gave the nodes nearest to its
        id."""
        return self._searches.find_addrs(peer_id)

    # --- answering ----------------------------------------------------------------------------------------------------

    async def _answer_find(self, peer_id: str, request: bytes) -> bytes:
        await self._pace.wait(peer_id)
        answer = self._answer(peer_id, request)
        if answer is not None and self._streams is not None:
            answer = answer.within(MAX_UNARY_BYTES, self._chance)
        return _NO_ANSWER if answer is None else answer.to_bytes()

    async def _answer_whole(self, peer_id: str, request: bytes) -> bytes:
        await self._pace.wait(peer_id)
        data = _NO_ANSWER if (answer := self._answer(peer_id, request)) is None else answer.to_bytes()
        self._pace.count(peer_id, len(data) / WHOLE_CALL_BYTES)
        return data

    def _answer(self, peer_id: str, request: bytes) -> FindResponse | None:
        """Return the whole answer, or None if the request is malformed."""
        try:
            asked = FindRequest.from_bytes(request)
            if asked.addrs:
                self.known.meet(peer_id, asked.addrs)
        except PeerViolation as violation:
            logger.debug("%s sent a malformed request for keys: %s", peer_id, violation)
            return None
        found = (self._found(peer_id, key, asked) for key in asked.keys)
        return FindResponse.fitting(found, self.known.own_addrs)

    async def _answer_store(self, peer_id: str, request: bytes) -> bytes:
        await self._pace.wait(peer_id)
        try:
            record = StoreRequest.from_bytes(request).record
        except PeerViolation as violation:
            logger.debug("%s sent a malformed request to store: %s", peer_id, violation)
            self._num_refused += 1
            return _NO_ANSWER
        envelope = self._validator.envelope(record)
        if envelope is not None and not self.may_store(peer_id, envelope):
            envelope = None
        self._num_refused += envelope is None
        is_held = envelope is not None and self._storage.store(envelope, record)
        return (_HELD if is_held else _NOT_HELD).to_bytes()

    def _found(self, asker: str, key: bytes, asked: FindRequest) -> Found:
        others = self.known.table.nearest(to_id(key), WIDTH + 1)
        others = [peer_id for peer_id in others if peer_id != asker][:WIDTH]
        peers = tuple(map(self.known.book.contact, others))
        records = () if asked.only_peers else self._storage.get(key)
        if 0 < asked.max_records < len(records):
            records = tuple(self._chance.sample(records, asked.max_records))
        return Found(records=records, peers=peers)


def _is_held(answers: Iterable[StoreResponse]) -> bool:
    """Return whether most of the nodes that answered hold the record. All nodes of a full key refuse it."""
    held = [answer.held for answer in answers]
    return sum(held) * 2 > len(held)
