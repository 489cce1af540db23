"""Runs the searches of one node in the record DHT: for records under keys, and for the addresses of a peer.

`NodeLookup` decides which peers to ask next. The end of each call starts the next ones, so that a search of many calls
wakes its caller only once. A search belongs to its caller, and ends with it. At its deadline a search ends with the
results so far. So silent peers, however many of them a liar names, delay the other answers but hide none of them.

`RecordHolders` remembers what the searches for this node's own records found, since a search for each publication would
cost more than the calls that store it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Container, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from swarm_protocol.dht_messages import FindRequest, FindResponse, dht_id_of

from swarm.network.dht.known_peers import KnownPeers
from swarm.network.dht.record_storage import RecordValidator
from swarm.network.dht.routing_table import MAX_ADDRS, WIDTH, NodeLookup, RoutingTable, to_id
from swarm.newest_items import NewestItems

NUM_PARALLEL = 16
"""Maximum parallel calls of one search, so that a liar who names many silent peers leaves calls to other searches."""

WIDEN_S = 1.0
"""After this time an unfinished search is widened to WIDTH nodes, since some of the nearest seem to be gone."""

FIND_ADDRS_TIMEOUT_S = 2.0
"""Time-out of a search for the addresses of a peer that could not be dialled."""

SOUGHT_S = 2.0
"""Minimum time between two searches for the addresses of one peer, since callers dial a dead peer repeatedly."""

MAX_SEARCHED_KEYS = 256

_CHECKED_AT_ONCE = 32
"""Records checked before other tasks get a turn. Each signature takes a tenth of a millisecond."""

NUM_REPLICAS = 5
"""Nodes that store each record. A record survives until its refresh unless all of them fail."""

MIN_HOLD_S = 20.0
"""Minimum time for which the nearest nodes of a key are remembered. It is less than the time until a record is
published again, so in a changing network each publication makes a new search."""

MAX_HOLD_S = 300.0
"""Maximum time for which they are remembered. In a network whose half leaves within an hour, about one of ten nodes
near a key is new after five minutes. Readers ask ten nodes, and owners store with five."""

MAX_HELD_KEYS = 256


class _Sought:
    """The search for one peer's addresses. Callers take turns, and each goes on where the last one stopped."""

    def __init__(self, search: NodeLookup, until: float) -> None:
        self.search = search
        self.until = until
        self.lock = asyncio.Lock()


class Searches:
    """Runs searches that begin among the `known` peers. Only records that `validator` accepts count."""

    def __init__(self, peer_id: str, known: KnownPeers, validator: RecordValidator) -> None:
        self._peer_id = peer_id
        self._known = known
        self._validator = validator
        self._nearest = NewestItems[bytes, tuple[str, ...]](MAX_SEARCHED_KEYS)
        """The nodes nearest to a key in the last search for it, where the next search begins."""
        self._sought: dict[str, _Sought] = {}

    async def search(
        self,
        keys: Sequence[bytes],
        width: int,
        *,
        only_peers: bool,
        timeout_s: float,
        max_records: int = 0,
        spared: Sequence[str] = (),
    ) -> NodeLookup:
        """Ask the known nodes nearest to each key, and the nodes that they name, until the `width` nearest of each key
        have been asked, or the WIDTH nearest if the search takes longer than WIDEN_S. `spared` nodes count as asked."""
        search = NodeLookup(keys, self._peer_id, width)
        search.spare(spared)
        await self._carry_out(search, only_peers=only_peers, timeout_s=timeout_s, max_records=max_records)
        for key in search.keys:
            self._nearest[key] = tuple(search.nearest(key, WIDTH))
        return search

    async def find_addrs(self, peer_id: str) -> AsyncGenerator[Sequence[str], None]:
        """Yield addresses of `peer_id`: those that it gave this node, then those that it gave the nodes nearest to its
        id.

        All are only hints: a dial succeeds only if a host with the peer's key answers.
        """
        tried: dict[str, None] = {}
        found = self._known.book.of(peer_id)
        sought = self._search_for(peer_id)
        while True:
            if found:
                yield found
                tried.update(dict.fromkeys(found))
            if peer_id == self._peer_id:
                return
            found = await self._more_addrs(sought, peer_id, tried)
            if not found:
                return

    def _search_for(self, peer_id: str) -> _Sought:
        """Return the search for the addresses of `peer_id`, which all callers within SOUGHT_S share."""
        now = asyncio.get_running_loop().time()
        self._sought = {each: sought for each, sought in self._sought.items() if sought.until > now}
        if peer_id not in self._sought:
            search = NodeLookup([dht_id_of(peer_id)], self._peer_id)
            search.drop(peer_id)  # it could not be dialled
            self._sought[peer_id] = _Sought(search, until=now + SOUGHT_S)
        return self._sought[peer_id]

    async def _more_addrs(self, sought: _Sought, peer_id: str, tried: Collection[str]) -> tuple[str, ...]:
        """Return addresses that nodes name and that are not in `tried`. A liar that answers first delays the others'
        answers but hides none."""

        def named() -> tuple[str, ...]:
            return tuple(addr for addr in sought.search.addrs_of(peer_id) if addr not in tried)[:MAX_ADDRS]

        async with sought.lock:
            if not named():
                await self._carry_out(
                    sought.search, only_peers=True, timeout_s=FIND_ADDRS_TIMEOUT_S, is_over=lambda: bool(named())
                )
        return named()

    async def _carry_out(
        self,
        search: NodeLookup,
        *,
        only_peers: bool,
        timeout_s: float,
        max_records: int = 0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        suspects = self._known.suspects.at(asyncio.get_running_loop().time())
        for key in search.keys:
            search.meet(self._known.table.nearest(to_id(key), WIDTH), suspects)
            search.meet(self._nearest.get(key, ()), suspects)

        @cache
        def request_for(*wanted: bytes) -> tuple[FindRequest, bytes]:
            request = FindRequest(
                keys=wanted, only_peers=only_peers, addrs=self._known.own_addrs, max_records=max_records
            )
            return request, request.to_bytes()

        def ask(peer_id: str, wanted: Sequence[bytes]) -> Coroutine[Any, Any, None]:
            request, data = request_for(*wanted)
            return self._ask(search, suspects, peer_id, request.keys, data)

        calls = _SearchCalls(search, ask, only_peers=only_peers, is_over=is_over)
        await calls.run(timeout_s)

    async def _ask(
        self, search: NodeLookup, suspects: Container[str], peer_id: str, keys: Sequence[bytes], request: bytes
    ) -> None:
        """Send the encoded `request` for `keys` to a peer, and take in its answer."""
        answer = await self._known.find(peer_id, len(keys), request, search.addrs_of(peer_id)[:MAX_ADDRS])
        if answer is None:
            search.drop(peer_id)
            return
        search.answered.add(peer_id)
        await self._hear(search, suspects, peer_id, keys, answer)
        if answer.is_cut:
            whole = await self._known.find_whole(peer_id, len(keys), request)
            if whole is not None:
                answer = whole
                await self._hear(search, suspects, peer_id, keys, answer)
        search.left_out(peer_id, keys[len(answer.found) :])

    async def _hear(
        self, search: NodeLookup, suspects: Container[str], peer_id: str, keys: Sequence[bytes], answer: FindResponse
    ) -> None:
        for key, each in zip(keys, answer.found, strict=False):
            search.hear(each.peers[:WIDTH], suspects, named_by=peer_id)
            await self.take_in(search, key, each.records)

    async def take_in(self, search: NodeLookup, dht_id: bytes, records: Sequence[bytes]) -> None:
        """Add those of `records` that are valid and belong to `dht_id`. Invalid ones are skipped."""
        for index, data in enumerate(records, 1):
            envelope = self._validator.envelope(data)
            if envelope is not None and dht_id_of(envelope.subject) == dht_id:
                search.take_in(envelope)
            if index % _CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)


class _SearchCalls:
    """Calls `ask(peer_id, keys)` for the peers that `search` names, until none is left or `is_over()` is true."""

    def __init__(
        self,
        search: NodeLookup,
        ask: Callable[[str, Sequence[bytes]], Coroutine[Any, Any, None]],
        *,
        only_peers: bool,
        is_over: Callable[[], bool],
    ) -> None:
        """With `only_peers` no records are searched for, so a search without records is not widened."""
        self._search = search
        self._ask = ask
        self._only_peers = only_peers
        self._is_over = is_over
        self._running: dict[int, tuple[asyncio.Task[None], str, list[bytes]]] = {}
        self._numbers = itertools.count()
        self._turns = asyncio.Semaphore(NUM_PARALLEL)
        self._group = asyncio.TaskGroup()

    async def run(self, timeout_s: float) -> None:
        """Run the search once, for at most `timeout_s`. Peers whose calls have not ended may be asked again later."""
        late = asyncio.get_running_loop().call_later(WIDEN_S, self._widen_late)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s), self._group:
                    self._go_on()
        finally:
            late.cancel()
            for _, peer_id, keys in self._running.values():  # these calls were cancelled, some before they began
                self._search.left_out(peer_id, keys)

    async def _call(self, number: int, peer_id: str, keys: Sequence[bytes]) -> None:
        async with self._turns:
            await self._ask(peer_id, keys)
        del self._running[number]
        self._go_on()

    def _go_on(self) -> None:
        """Ask the next peers. The search ends with its last call."""
        if self._is_over():
            for call, _, _ in self._running.values():
                call.cancel()
            return
        for peer_id, keys in self._search.next_calls():
            number = next(self._numbers)
            self._running[number] = (self._group.create_task(self._call(number, peer_id, keys)), peer_id, keys)
        if not (self._running or self._only_peers or self._search.records):
            self._widen()  # the asked nodes hold no record, but others may

    def _widen(self) -> None:
        if self._search.width < WIDTH:
            self._search.width = WIDTH
            self._go_on()

    def _widen_late(self) -> None:
        """Widen a slow search, unless it is ending: by its deadline or with its last call."""
        if self._running and not any(call.cancelling() for call, _, _ in self._running.values()):
            self._widen()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holders:
    """The nodes nearest to a key, as a search found them. They are current for `hold_s` seconds, until `until`.
    `passed_over` were the nearest in the routing table at that time; some of them may not have answered."""

    peers: tuple[str, ...]
    passed_over: Sequence[str]
    hold_s: float
    until: float


class RecordHolders:
    """Remembers the nodes nearest to up to MAX_HELD_KEYS keys, by the keys' DHT ids. `table` shows when a nearer node
    is known."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table
        self._of = NewestItems[bytes, _Holders](MAX_HELD_KEYS)

    def of(self, dht_id: bytes) -> tuple[str, ...]:
        """Return the holders of the last search, without those lost since; none if there was no search."""
        holders = self._of.get(dht_id)
        return holders.peers if holders is not None else ()

    def are_current(self, dht_id: bytes) -> bool:
        """Return whether the holders are still current: it is not time to search again, and no nearer node is known."""
        holders = self._of.get(dht_id)
        if holders is None or asyncio.get_running_loop().time() >= holders.until:
            return False
        nearest = set(self._table.nearest(to_id(dht_id), NUM_REPLICAS))
        return nearest <= {*holders.peers, *holders.passed_over}

    def lose(self, dht_id: bytes, gone: Collection[str]) -> None:
        """Forget holders that did not answer, so that the next publication searches again."""
        if dht_id in self._of:
            holders = self._of[dht_id]
            peers = tuple(peer for peer in holders.peers if peer not in gone)
            self._of[dht_id] = replace(holders, peers=peers, until=0.0)

    def remember(self, dht_id: bytes, nearest: tuple[str, ...]) -> None:
        """Remember the nearest nodes, for longer the longer they have stayed the same."""
        before = self._of.pop(dht_id, None)
        hold_s = MIN_HOLD_S
        if before is not None and (num_new := len({*nearest} - {*before.peers})) <= 1:
            hold_s = min(MAX_HOLD_S, before.hold_s * 2) if num_new == 0 else max(MIN_HOLD_S, before.hold_s / 2)
        passed_over = self._table.nearest(to_id(dht_id), NUM_REPLICAS)
        now = asyncio.get_running_loop().time()
        self._of[dht_id] = _Holders(peers=nearest, passed_over=passed_over, hold_s=hold_s, until=now + hold_s)

    def clear(self) -> None:
        self._of.clear()
