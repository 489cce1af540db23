"""The calls of one search in the record DHT, which runs until nobody is left to be asked, or its time is up.

`NodeLookup` says whom to ask next. The end of each call begins the next ones, so that a search of many calls wakes its
caller once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from swarm.network.dht.routing_table import WIDTH, NodeLookup

WIDEN_S = 1.0
"""A search that is not over by then asks as many nodes as any: some of the nearest seem to be gone."""


class RunningCall(Protocol):
    """The part of a task that a search uses."""

    def cancel(self) -> object: ...

    def cancelling(self) -> int: ...


class CallGroup(Protocol):
    """The part of `asyncio.TaskGroup` that a search uses."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None: ...

    def create_task(self, call: Coroutine[Any, Any, None], /) -> RunningCall: ...


class SearchCalls:
    """Asks whom `search` names, by `ask(peer_id, keys)`, until `is_over` is true after an answer."""

    def __init__(
        self,
        search: NodeLookup,
        ask: Callable[[str, Sequence[bytes]], Coroutine[Any, Any, None]],
        *,
        group: CallGroup,
        only_peers: bool,
        is_over: Callable[[], bool],
    ) -> None:
        """`group` runs the calls. With `only_peers` no records are searched for, and so none are missing."""
        self._search = search
        self._ask = ask
        self._only_peers = only_peers
        self._is_over = is_over
        self._running: dict[int, tuple[RunningCall, str, list[bytes]]] = {}
        self._numbers = itertools.count()
        self._group = group

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
