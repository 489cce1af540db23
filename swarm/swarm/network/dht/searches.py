"""The searches of one node in the record DHT: for what is under keys, and for the addresses of a peer.

`NodeLookup` says whom to ask next. The end of each call begins the next ones, so that a search of many calls wakes its
caller once. A search belongs to its caller and ends with it. At its deadline it is done with what it has: peers that
answer nothing, however many a liar names, delay what the others said and hide none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Container, Coroutine, Sequence
from functools import cache
from typing import Any

from swarm_protocol.dht_messages import FindRequest, FindResponse, dht_id_of

from swarm.network.dht.known_peers import KnownPeers
from swarm.network.dht.record_storage import RecordValidator
from swarm.network.dht.routing_table import WIDTH, NodeLookup, to_id
from swarm.newest_items import NewestItems

WIDEN_S = 1.0
"""A search that is not over by then asks as many nodes as any: some of the nearest seem to be gone."""

FIND_ADDRS_TIMEOUT_S = 2.0
"""Time-out of an address search whose caller waits for a peer that could not be dialled."""

SOUGHT_S = 2.0
"""A peer's addresses are searched for anew no more often: a dead one is dialled again and again."""

MAX_SEARCHED_KEYS = 256

_CHECKED_AT_ONCE = 32
"""Signatures, a tenth of a millisecond each, before others have their turn."""


class _Sought:
    """A peer whose addresses are searched for. Callers take turns, and each goes on where the last one stopped."""

    def __init__(self, search: NodeLookup, until: float) -> None:
        self.search = search
        self.until = until
        self.lock = asyncio.Lock()


class Searches:
    """Searches that begin among the peers that are `known`. Records count that `validator` passes."""

    def __init__(self, peer_id: str, known: KnownPeers, validator: RecordValidator) -> None:
        self._peer_id = peer_id
        self._known = known
        self._validator = validator
        self._nearest = NewestItems[bytes, tuple[str, ...]](MAX_SEARCHED_KEYS)
        """The nodes nearest to a key by the last search for it: the next one begins there."""
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
        """Ask the nearest nodes of every key, and whom they name, until the `width` nearest of all have been asked, or
        WIDTH of them where that takes longer than WIDEN_S. Those that are `spared` count as asked."""
        search = NodeLookup(keys, self._peer_id, width)
        search.spare(spared)
        await self._carry_out(search, only_peers=only_peers, timeout_s=timeout_s, max_records=max_records)
        for key in search.keys:
            self._nearest[key] = tuple(search.nearest(key, WIDTH))
        return search

    async def find_addrs(self, peer_id: str) -> AsyncGenerator[Sequence[str], None]:
        """Yield addresses of `peer_id`: what it told this node, then what it told the nodes nearest to its id.

        Both are hints: a dial succeeds only if the peer's key answers.
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
        """Share one search among all who want to reach `peer_id` within SOUGHT_S."""
        now = asyncio.get_running_loop().time()
        self._sought = {each: sought for each, sought in self._sought.items() if sought.until > now}
        if peer_id not in self._sought:
            search = NodeLookup([dht_id_of(peer_id)], self._peer_id)
            search.drop(peer_id)  # it could not be dialled
            self._sought[peer_id] = _Sought(search, until=now + SOUGHT_S)
        return self._sought[peer_id]

    async def _more_addrs(self, sought: _Sought, peer_id: str, tried: Collection[str]) -> tuple[str, ...]:
        """Return addresses that nodes name besides `tried`. A liar that answers first delays the others' answers but
        hides none."""

        def named() -> tuple[str, ...]:
            return tuple(addr for addr in sought.search.addrs_of(peer_id) if addr not in tried)

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
        """Ask for the `keys` of the encoded `request`."""
        answer = await self._known.find(peer_id, len(keys), request, search.addrs_of(peer_id))
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
        """Take in those of `records` that are valid and of `dht_id`. The rest is no harm to what else is there."""
        for index, data in enumerate(records, 1):
            envelope = self._validator.envelope(data)
            if envelope is not None and dht_id_of(envelope.subject) == dht_id:
                search.take_in(envelope)
            if index % _CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)


class _SearchCalls:
    """Asks whom `search` names, by `ask(peer_id, keys)`, until `is_over` is true after an answer."""

    def __init__(
        self,
        search: NodeLookup,
        ask: Callable[[str, Sequence[bytes]], Coroutine[Any, Any, None]],
        *,
        only_peers: bool,
        is_over: Callable[[], bool],
    ) -> None:
        """With `only_peers` no records are searched for, and so none are missing."""
        self._search = search
        self._ask = ask
        self._only_peers = only_peers
        self._is_over = is_over
        self._running: dict[int, tuple[asyncio.Task[None], str, list[bytes]]] = {}
        self._numbers = itertools.count()
        self._group = asyncio.TaskGroup()

    async def run(self, timeout_s: float) -> None:
        """Run once. Whose call has not ended by then may be asked again by a later search."""
        late = asyncio.get_running_loop().call_later(WIDEN_S, self._widen_late)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s), self._group:
                    self._go_on()
        finally:
            late.cancel()
            for _, peer_id, keys in self._running.values():  # cancelled, some of them before they began
                self._search.left_out(peer_id, keys)

    async def _call(self, number: int, peer_id: str, keys: Sequence[bytes]) -> None:
        await self._ask(peer_id, keys)
        del self._running[number]
        self._go_on()

    def _go_on(self) -> None:
        """Ask whoever is to be asked next. The search ends with its last call."""
        if self._is_over():
            for call, _, _ in self._running.values():
                call.cancel()
            return
        for peer_id, keys in self._search.next_calls():
            number = next(self._numbers)
            self._running[number] = (self._group.create_task(self._call(number, peer_id, keys)), peer_id, keys)
        if not (self._running or self._only_peers or self._search.records):
            self._widen()  # they hold none, and others may

    def _widen(self) -> None:
        if self._search.width < WIDTH:
            self._search.width = WIDTH
            self._go_on()

    def _widen_late(self) -> None:
        """Widen a search that takes long, and not one that is ending, by its deadline or with its last call."""
        if self._running and not any(call.cancelling() for call, _, _ in self._running.values()):
            self._widen()
