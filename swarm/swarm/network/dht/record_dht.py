"""The record DHT: Kademlia (Maymounkov and Mazieres 2002) over unary calls.

Puts together the parts: `known_peers` calls others, `routing_table` knows them, their addresses and whom to ask next
(`NodeLookup`), `searches` asks them, and `record_storage` has the records that this node holds and decides which
ones are valid (`RecordValidator`). `RecordHolders` remembers the nodes that took a key's last record, since a search
for each publication would cost more than the calls that store it.

Names on the wire carry the network id, so the DHTs of two networks never mix, whatever seeds they share.

It also finds the addresses of peers, in place of go-libp2p's own DHT: each node tells its addresses
with each request and answer, so that the nodes near its DHT id know them.

Deviation from the paper: nodes hand on no records. Owners publish theirs anew, most of them every half minute
(`Announcer`), to the nodes that are nearest then, so a newcomer near a key soon holds what belongs there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

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
from swarm.network.dht.routing_table import NARROW_WIDTH, SAMPLE_WIDTH, WIDTH, RoutingTable, node_id_of, to_id
from swarm.network.dht.searches import Searches
from swarm.network.peer_budgets import MAX_UNARY_BYTES
from swarm.newest_items import NewestItems

NUM_PARALLEL_CHECKS = 8
"""Calls that check members of the routing table. Silent members, which a stranger can provide, thus leave half of all
calls to searches."""

SEARCH_TIMEOUT_S = 4.0
"""Time-out of the search for the nodes that store a record. It covers one silent round of calls and leaves a second of
the publisher's five."""

NUM_NAMING = 2
"""Holders of a record that are asked who else is near its key, of those that have just taken it again. Drawn anew each
time, so that one that lies hides no newcomer."""

NUM_FIRST_SEARCHES = 2
SEARCH_EVERY = 5

DOUBT_S = 360.0
"""A peer of the routing table is pinged if it was not heard of for this time. The nearest ones are, by each search."""

MAKE_ROOM_S = 1.0
"""Time within which further members are pinged where one was found to have gone."""

NUM_REPLICAS = 5
"""Records outlive this many less one simultaneous deaths, until their owner refreshes them."""

MIN_HOLD_S = 20.0
"""Less than the time until a record is published again: in a network that changes, each time is a new search."""

MAX_HOLD_S = 300.0
"""In five minutes of a network whose half leaves in an hour, one of ten nodes near a key is a new one. Readers ask ten
nodes, and owners store with five."""

MAX_HELD_KEYS = 256

_HELD, _NOT_HELD = StoreResponse(held=True), StoreResponse(held=False)

_NO_ANSWER = b""
"""The answer to a malformed request. No decoder accepts it."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtCounts:
    """`num_records` are held here for everyone, `num_refused` were offered since the start and not in order, and
    `num_peers` are in the routing table. `num_addresses` are the peers whose addresses are known."""

    num_records: int
    num_refused: int
    num_peers: int
    num_addresses: int


class RecordDht:
    """Publishes and finds records in the network's Kademlia table, and answers other nodes that do so."""

    def __init__(
        self, host: RecordTransport, prefix: str, validator: RecordValidator, streams: StreamedCalls | None = None
    ) -> None:
        """Without `streams`, small answers are as large as others."""
        self._host = host
        self._streams = streams
        self._validator = validator
        self.known = KnownPeers(host, prefix, streams)
        self._storage = RecordStorage(validator.now)
        self._searches = Searches(host.peer_id, self.known, validator)
        self._holders = RecordHolders(self.known.table)
        self.last_hops = 0
        """Calls one after the other by which the last `find` came to the node nearest to a key."""
        self._num_tended = 0
        self._num_refused = 0
        self._checks = asyncio.Semaphore(NUM_PARALLEL_CHECKS)
        self._chance = random.Random(host.peer_id)
        self.may_store: Callable[[str, Envelope], bool] = lambda _peer_id, _envelope: True
        """Returns whether a peer may store a record here; a private network sets it."""

    @classmethod
    async def create(
        cls, host: RecordTransport, prefix: str, validator: RecordValidator, streams: StreamedCalls | None = None
    ) -> RecordDht:
        """Raises PeerUnreachable if the daemon ends meanwhile."""
        dht = cls(host, prefix, validator, streams)
        if streams is not None:
            size = limits.MAX_FIND_REQUEST_BYTES
            await streams.serve_streamed(f"{prefix}{WHOLE}", dht._answer_whole, max_request_bytes=size)
        await host.serve(f"{prefix}find", dht._answer_find)
        await host.serve(f"{prefix}store", dht._answer_store)
        return dht

    def peers(self) -> tuple[str, ...]:
        """Return everyone in the routing table."""
        return self.known.table.peers

    def contacts(self) -> tuple[Contact, ...]:
        """Return everyone in the routing table who said where to dial it."""
        found = map(self.known.book.contact, self.known.table.peers)
        return tuple(contact for contact in found if contact.addrs)

    @property
    def counts(self) -> DhtCounts:
        """Return the current counts. Records include expired ones that are not cleared away yet."""
        return DhtCounts(
            num_records=self._storage.num_records,
            num_refused=self._num_refused,
            num_peers=self.known.table.num_peers,
            num_addresses=len(self.known.book),
        )

    async def ping(self, peer_id: str, addrs: Sequence[str] = ()) -> bool:
        """Make `peer_id`, perhaps at `addrs`, and this node known to each other.

        False also if its key is of a kind that no node has.
        """
        try:
            check_peer_id(peer_id)
        except ValueError:
            return False
        return await self.known.find(peer_id, 0, FindRequest(addrs=self.known.own_addrs).to_bytes(), addrs) is not None

    async def refresh(self) -> None:
        """Meet the nodes nearest to this one: who has searched for itself can be found by all others."""
        await self._searches.search(
            [dht_id_of(self._host.peer_id)], NARROW_WIDTH, only_peers=True, timeout_s=SEARCH_TIMEOUT_S
        )

    async def make_room(self) -> None:
        """Look whether members of the routing table have gone for whose places newcomers wait. To be called every few
        seconds: nobody finds the address of a node that no table has."""
        loop = asyncio.get_running_loop()
        until = loop.time() + MAKE_ROOM_S
        while loop.time() < until and (peers := self.known.table.crowded(loop.time())):
            await self._check(peers)

    async def tend(self) -> None:
        """Look who of the routing table has gone, forget records that are due to be dropped, and `refresh`. Once a
        minute; of every two times each bucket has its turn once, and a node that has been there for a while searches
        for itself at every fifth: who comes later searches, too, and both meet."""
        self._storage.clear_due()
        turn, self._num_tended = self._num_tended, self._num_tended + 1
        heard_before_s = asyncio.get_running_loop().time() - DOUBT_S
        await self._check(self.known.table.doubtful(turn, heard_before_s))
        if turn % SEARCH_EVERY == 0:
            self.known.book.forget_all_but(frozenset(self.known.table.peers))
        if turn < NUM_FIRST_SEARCHES or turn % SEARCH_EVERY == 0:
            await self.refresh()

    async def _check(self, members: Sequence[str]) -> None:
        """Ping members of the routing table, which loses those that do not answer."""

        async def check(peer_id: str) -> None:
            async with self._checks:
                await self.ping(peer_id)

        await asyncio.gather(*map(check, members))

    async def store(self, envelope: Envelope) -> bool:
        """Place `envelope` with the nodes nearest to its key. False: most of them did not take it, or none is there.

        The nodes that took the key's last record get this one first, and are taken to be the nearest until one of them
        does not answer, a nearer node is known, or it is time to search again.
        """
        dht_id, data = dht_id_of(envelope.subject), envelope.to_bytes()
        request = StoreRequest(record=data).to_bytes()
        holders, are_current = self._holders.of(dht_id), self._holders.are_current(dht_id)
        answers = await self._store_with(holders, request)
        if gone := set(holders) - answers.keys():
            self._holders.lose(dht_id, gone)
        # waiting for the first that are gone has taken the time of a search; further ones do not put it off again
        is_put_off = bool(gone) and len(holders) == NUM_REPLICAS
        if len(answers) > NUM_REPLICAS // 2 and (are_current or is_put_off):
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
        """Search for the nodes nearest to every key anew: which they are may have changed at once, as when a partition
        healed."""
        self._holders.clear()

    async def _store_with(self, peers: Sequence[str], request: bytes) -> dict[str, StoreResponse]:
        """Return the answers of those that have answered."""
        decode = StoreResponse.from_bytes
        calls = (self.known.call(peer_id, "store", request, decode) for peer_id in peers)
        answers = zip(peers, await asyncio.gather(*calls), strict=True)
        return {peer_id: answer for peer_id, answer in answers if answer is not None}

    def _keep_own(self, envelope: Envelope, data: bytes, nearest: Sequence[str]) -> None:
        """Hold the record here, too, if this node is one of the nearest to its key."""
        number = to_id(dht_id_of(envelope.subject))
        farthest = [node_id_of(peer_id) ^ number for peer_id in nearest[NUM_REPLICAS - 1 :]]
        if not farthest or node_id_of(self._host.peer_id) ^ number < farthest[0]:
            self._storage.store(envelope, data)

    async def find(self, keys: Sequence[str], *, timeout_s: float, max_records: int = 0) -> tuple[list[Envelope], bool]:
        """Return the newest record of each key and signer, expired ones included, and whether any node was there to
        ask.

        With `max_records`, a sample of each key that has more: SAMPLE_WIDTH nodes are asked, and others only if these
        hold none.
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
        """Return the addresses that `peer_id` told this node; none if it is not in the routing table."""
        return self.known.book.of(peer_id)

    def find_addrs(self, peer_id: str) -> AsyncGenerator[Sequence[str], None]:
        """Yield addresses of `peer_id`: what it told this node, then what it told the nodes nearest to its id."""
        return self._searches.find_addrs(peer_id)

    # --- answering ----------------------------------------------------------------------------------------------------

    async def _answer_find(self, peer_id: str, request: bytes) -> bytes:
        answer = self._answer(peer_id, request)
        if answer is not None and self._streams is not None:
            answer = answer.within(MAX_UNARY_BYTES, self._chance)
        return _NO_ANSWER if answer is None else answer.to_bytes()

    async def _answer_whole(self, peer_id: str, request: bytes) -> bytes:
        answer = self._answer(peer_id, request)
        return _NO_ANSWER if answer is None else answer.to_bytes()

    def _answer(self, peer_id: str, request: bytes) -> FindResponse | None:
        """Return the whole answer. None: the request is malformed."""
        try:
            asked = FindRequest.from_bytes(request)
            if asked.addrs:
                self.known.meet(peer_id, asked.addrs)
        except PeerViolation as violation:
            logger.debug("%s asked for something else: %s", peer_id, violation)
            return None
        found = (self._found(peer_id, key, asked) for key in asked.keys)
        return FindResponse.fitting(found, self.known.own_addrs)

    async def _answer_store(self, peer_id: str, request: bytes) -> bytes:
        try:
            record = StoreRequest.from_bytes(request).record
        except PeerViolation as violation:
            logger.debug("%s stored something else: %s", peer_id, violation)
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
    """Return whether most of the nodes that answered hold the record. A full key's nodes refuse it all alike."""
    held = [answer.held for answer in answers]
    return sum(held) * 2 > len(held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holders:
    """The nodes nearest to a key, as a search found them; good for `hold_s`, which ends at `until`. `passed_over` were
    nearest of those that this node knew then, some of which may not have answered."""

    peers: tuple[str, ...]
    passed_over: Sequence[str]
    hold_s: float
    until: float


class RecordHolders:
    """Remembers the holders of MAX_HELD_KEYS keys, by the keys' DHT ids. `table` knows nodes that are nearer."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table
        self._of = NewestItems[bytes, _Holders](MAX_HELD_KEYS)

    def of(self, dht_id: bytes) -> tuple[str, ...]:
        """Return the holders by the last search, without those that are lost since; none if there was no search."""
        holders = self._of.get(dht_id)
        return holders.peers if holders is not None else ()

    def are_current(self, dht_id: bytes) -> bool:
        """Return whether it is not yet time to search again, and no nearer node is known."""
        holders = self._of.get(dht_id)
        if holders is None or asyncio.get_running_loop().time() >= holders.until:
            return False
        nearest = set(self._table.nearest(to_id(dht_id), NUM_REPLICAS))
        return nearest <= {*holders.peers, *holders.passed_over}

    def lose(self, dht_id: bytes, gone: Collection[str]) -> None:
        """Forget holders that did not answer, and let the next time be a new search."""
        if dht_id in self._of:
            holders = self._of[dht_id]
            peers = tuple(peer for peer in holders.peers if peer not in gone)
            self._of[dht_id] = replace(holders, peers=peers, until=0.0)

    def remember(self, dht_id: bytes, nearest: tuple[str, ...]) -> None:
        """Go by `nearest` the longer, the longer they have stayed the same. Fewer than all replicas are a network that
        has just begun, where the next node to come is one of them."""
        before = self._of.pop(dht_id, None)
        if len(nearest) < NUM_REPLICAS:
            return
        hold_s = MIN_HOLD_S
        if before is not None and (num_new := len({*nearest} - {*before.peers})) <= 1:
            hold_s = min(MAX_HOLD_S, before.hold_s * 2) if num_new == 0 else max(MIN_HOLD_S, before.hold_s / 2)
        passed_over = self._table.nearest(to_id(dht_id), NUM_REPLICAS)
        now = asyncio.get_running_loop().time()
        self._of[dht_id] = _Holders(peers=nearest, passed_over=passed_over, hold_s=hold_s, until=now + hold_s)

    def clear(self) -> None:
        self._of.clear()
