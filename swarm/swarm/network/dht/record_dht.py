"""The record DHT: Kademlia (Maymounkov and Mazieres 2002) over unary calls.

Puts together the parts: `known_peers` calls others, `routing_table` knows them, their addresses and whom to ask next
(`NodeLookup`), `search_calls` asks them, and `record_storage` has the records that this node holds and decides which
ones are valid (`RecordValidator`).

A search belongs to its caller and ends with it. At its deadline it is done with what it has: peers that answer nothing,
however many a liar names, delay what the others said and hide none of it.
Names on the wire carry the network id, so the DHTs of two networks never mix, whatever seeds they share.

It also finds the addresses of peers (`address_search`), in place of go-libp2p's own DHT: each node tells its addresses
with each request and answer, so that the nodes near its DHT id know them.

Deviation from the paper: nodes hand on no records. Owners publish theirs anew, most of them every half minute
(`Announcer`), to the nodes that are nearest then, so a newcomer near a key soon holds what belongs there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Container, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

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

from swarm.network.dht.address_search import AddressSearch
from swarm.network.dht.known_peers import KnownPeers, RecordTransport
from swarm.network.dht.large_answers import LargeAnswers, StreamedCalls
from swarm.network.dht.record_holders import MAX_HELD_KEYS, NUM_REPLICAS, RecordHolders
from swarm.network.dht.record_storage import RecordStorage, RecordValidator
from swarm.network.dht.routing_table import (
    NARROW_WIDTH,
    SAMPLE_WIDTH,
    WIDTH,
    NodeLookup,
    node_id_of,
    to_id,
)
from swarm.network.dht.search_calls import CallGroup, SearchCalls
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

_CHECKED_AT_ONCE = 32
"""Signatures, a tenth of a millisecond each, before others have their turn."""

NUM_FIRST_SEARCHES = 2
SEARCH_EVERY = 5

DOUBT_S = 360.0
"""A peer of the routing table is pinged if it was not heard of for this time. The nearest ones are, by each search."""

MAKE_ROOM_S = 1.0
"""Time within which further members are pinged where one was found to have gone."""

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
        self._validator = validator
        self.known = KnownPeers(host, prefix)
        self._storage = RecordStorage(validator.now)
        self.own_addrs: tuple[str, ...] = ()
        """This node's own addresses, kept up to date by its network. While it has none, it only asks others."""
        self._nearest = NewestItems[bytes, tuple[str, ...]](MAX_HELD_KEYS)
        """The nodes nearest to a key by the last search for it: the next one begins there."""
        self._addresses = AddressSearch(host.peer_id, self.known.book, self._carry_out)
        self._holders = RecordHolders(self.known.table)
        self.last_hops = 0
        """Calls one after the other by which the last `find` came to the node nearest to a key."""
        self._num_tended = 0
        self._num_refused = 0
        self._checks = asyncio.Semaphore(NUM_PARALLEL_CHECKS)
        self._chance = random.Random(host.peer_id)
        self._large = LargeAnswers(streams, prefix, self._chance)
        self.may_store: Callable[[str, Envelope], bool] = lambda _peer_id, _envelope: True
        """Returns whether a peer may store a record here; a private network sets it."""

    @classmethod
    async def create(
        cls, host: RecordTransport, prefix: str, validator: RecordValidator, streams: StreamedCalls | None = None
    ) -> RecordDht:
        """Raises PeerUnreachable if the daemon ends meanwhile."""
        dht = cls(host, prefix, validator, streams)
        await dht._large.serve(dht._answer_whole)
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
        return await self._find(peer_id, 0, FindRequest(addrs=self.own_addrs).to_bytes(), addrs) is not None

    async def refresh(self) -> None:
        """Meet the nodes nearest to this one: who has searched for itself can be found by all others."""
        await self._search([dht_id_of(self._host.peer_id)], NARROW_WIDTH, only_peers=True, timeout_s=SEARCH_TIMEOUT_S)

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

        await self._side_by_side(map(check, members))

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
        search = await self._search([dht_id], width, only_peers=True, timeout_s=SEARCH_TIMEOUT_S, spared=spared)
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
        answers = zip(peers, await self._side_by_side(calls), strict=True)
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
        search = await self._search(dht_ids, width, only_peers=False, timeout_s=timeout_s, max_records=max_records)
        self.last_hops = search.most_hops()
        for dht_id in dht_ids:
            await self._take_in(search, dht_id, self._storage.get(dht_id))
        return list(search.records.values()), bool(search.answered) or not search.peers

    def known_addrs(self, peer_id: str) -> Sequence[str]:
        """Return the addresses that `peer_id` told this node; none if it is not in the routing table."""
        return self.known.book.of(peer_id)

    def find_addrs(self, peer_id: str) -> AsyncGenerator[Sequence[str], None]:
        """Yield addresses of `peer_id`: what it told this node, then what it told the nodes nearest to its id."""
        return self._addresses.find(peer_id)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _search(
        self,
        keys: Sequence[bytes],
        width: int,
        *,
        only_peers: bool,
        timeout_s: float,
        max_records: int = 0,
        spared: Sequence[str] = (),
    ) -> NodeLookup:
        """Ask the nearest nodes of every key, and whom they name, until the `width` nearest of all have been asked, or
        WIDTH of them where that takes longer than `search_calls.WIDEN_S`. Those that are `spared` count as asked."""
        search = NodeLookup(keys, self._host.peer_id, width)
        search.spare(spared)
        await self._carry_out(search, only_peers=only_peers, timeout_s=timeout_s, max_records=max_records)
        for key in search.keys:
            self._nearest[key] = tuple(search.nearest(key, WIDTH))
        return search

    async def _carry_out(
        self,
        search: NodeLookup,
        *,
        only_peers: bool,
        timeout_s: float,
        max_records: int = 0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        suspects = self.known.suspects.at(asyncio.get_running_loop().time())
        for key in search.keys:
            search.meet(self.known.table.nearest(to_id(key), WIDTH), suspects)
            search.meet(self._nearest.get(key, ()), suspects)

        @cache
        def request_for(*wanted: bytes) -> tuple[FindRequest, bytes]:
            request = FindRequest(keys=wanted, only_peers=only_peers, addrs=self.own_addrs, max_records=max_records)
            return request, request.to_bytes()

        def ask(peer_id: str, wanted: Sequence[bytes]) -> Coroutine[Any, Any, None]:
            request, data = request_for(*wanted)
            return self._ask(search, suspects, peer_id, request.keys, data)

        calls = SearchCalls(search, ask, group=self._call_group(), only_peers=only_peers, is_over=is_over)
        await calls.run(timeout_s)

    async def _side_by_side(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run calls at once and return what each returns."""
        return await asyncio.gather(*calls)

    def _call_group(self) -> CallGroup:
        """Return what runs the calls of a search. A simulation has one that makes no tasks."""
        return asyncio.TaskGroup()

    async def _ask(
        self, search: NodeLookup, suspects: Container[str], peer_id: str, keys: Sequence[bytes], request: bytes
    ) -> None:
        """Ask for the `keys` of the encoded `request`."""
        answer = await self._find(peer_id, len(keys), request, search.addrs_of(peer_id))
        if answer is None:
            search.drop(peer_id)
            return
        search.answered.add(peer_id)
        await self._hear(search, suspects, peer_id, keys, answer)
        if answer.is_cut:
            whole = await self._large.fetch(peer_id, request, partial(_decoded, peer_id, len(keys)))
            if whole is not None:
                answer = whole
                await self._hear(search, suspects, peer_id, keys, answer)
        search.left_out(peer_id, keys[len(answer.found) :])

    async def _hear(
        self, search: NodeLookup, suspects: Container[str], peer_id: str, keys: Sequence[bytes], answer: FindResponse
    ) -> None:
        for key, each in zip(keys, answer.found, strict=False):
            search.hear(each.peers[:WIDTH], suspects, named_by=peer_id)
            await self._take_in(search, key, each.records)

    async def _take_in(self, search: NodeLookup, dht_id: bytes, records: Sequence[bytes]) -> None:
        """Return those of `records` that are valid and of `dht_id`. The rest is no harm to what else is there."""
        for index, data in enumerate(records, 1):
            envelope = self._validator.envelope(data)
            if envelope is not None and dht_id_of(envelope.subject) == dht_id:
                search.take_in(envelope)
            if index % _CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _find(
        self, peer_id: str, num_keys: int, request: bytes, hints: Sequence[str] = ()
    ) -> FindResponse | None:
        """Ask for the first of the `num_keys` keys of the encoded `request`. None means no answer. `hints` are
        addresses of the peer that others named."""

        response = await self.known.call(peer_id, "find", request, partial(_decoded, peer_id, num_keys), hints)
        if response is not None:
            self.known.learn(peer_id, response.addrs)
        return response

    # --- answering ----------------------------------------------------------------------------------------------------

    async def _answer_find(self, peer_id: str, request: bytes) -> bytes:
        answer = self._answer(peer_id, request)
        return _NO_ANSWER if answer is None else self._large.cut(answer).to_bytes()

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
        return FindResponse.fitting(found, self.own_addrs)

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


def _decoded(peer_id: str, num_keys: int, answer: bytes) -> FindResponse:
    """Raises PeerViolation."""
    response = FindResponse.from_bytes(answer)
    if not min(1, num_keys) <= len(response.found) <= num_keys:
        raise PeerViolation(f"{len(response.found)} answers to {num_keys} keys", peer_id=peer_id)
    return response


def _is_held(answers: Iterable[StoreResponse]) -> bool:
    """Return whether most of the nodes that answered hold the record. A full key's nodes refuse it all alike."""
    held = [answer.held for answer in answers]
    return sum(held) * 2 > len(held)
