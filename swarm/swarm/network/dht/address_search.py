"""Searches the DHT for the addresses of a peer that could not be dialled.

The search itself is `RecordDht`'s, whose callers share one for each peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Protocol

from swarm_protocol.dht_messages import dht_id_of

from swarm.network.dht.routing_table import AddressBook, NodeLookup

FIND_ADDRS_TIMEOUT_S = 2.0
"""Time-out of an address search whose caller waits for a peer that could not be dialled."""

SOUGHT_S = 2.0
"""A peer's addresses are searched for anew no more often: a dead one is dialled again and again."""


class CarryOut(Protocol):
    """Asks the nodes of a search, until it is over or at its deadline."""

    async def __call__(
        self, search: NodeLookup, *, only_peers: bool, timeout_s: float, is_over: Callable[[], bool]
    ) -> None: ...


class _Sought:
    """A peer whose addresses are searched for. Callers take turns, and each goes on where the last one stopped."""

    def __init__(self, search: NodeLookup, until: float) -> None:
        self.search = search
        self.until = until
        self.lock = asyncio.Lock()


class AddressSearch:
    """Finds addresses in `book`, and by searches that `carry_out` carries out."""

    def __init__(self, own_id: str, book: AddressBook, carry_out: CarryOut) -> None:
        self._own_id = own_id
        self._book = book
        self._carry_out = carry_out
        self._sought: dict[str, _Sought] = {}

    async def find(self, peer_id: str) -> AsyncGenerator[Sequence[str], None]:
        """Yield addresses of `peer_id`: what it told this node, then what it told the nodes nearest to its id.

        Both are hints: a dial succeeds only if the peer's key answers.
        """
        tried: dict[str, None] = {}
        found = self._book.of(peer_id)
        sought = self._search_for(peer_id)
        while True:
            if found:
                yield found
                tried.update(dict.fromkeys(found))
            if peer_id == self._own_id:
                return
            found = await self._more_addrs(sought, peer_id, tried)
            if not found:
                return

    def _search_for(self, peer_id: str) -> _Sought:
        """Share one search among all who want to reach `peer_id` within SOUGHT_S."""
        now = asyncio.get_running_loop().time()
        self._sought = {each: sought for each, sought in self._sought.items() if sought.until > now}
        if peer_id not in self._sought:
            search = NodeLookup([dht_id_of(peer_id)], self._own_id)
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
