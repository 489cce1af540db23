"""Asks the daemon for its connections once for all who want to know them at the same time.

Many tasks poll the connections, such as one for each introduction that is under way, and each answer costs time that
grows with the number of connections. Here they share the answers: every caller gets one that was asked for afterwards,
and so many questions cost no more than one every PAUSE_S. There is no task: one of those who wait asks for all.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

PAUSE_S = 0.02
"""Least time from one question to the next. The first after a pause is asked at once."""

Connections = dict[str, tuple[str, ...]]
"""The remote addresses of all connections to each peer. It is shared: nobody may change it."""


class Asked(Protocol):
    """The part of `Control` that is used here."""

    async def connected_peers(self) -> Connections: ...


class SharedLook:
    def __init__(self, control: Asked) -> None:
        self._control = control
        self._turn = asyncio.Lock()
        self._num_asked = 0
        self._asked_at = -math.inf
        self._answer: Connections = {}
        self._answered = 0  # the number of the question that `_answer` is of

    async def look(self) -> Connections:
        """Return the connections at a moment after this call. Raises what `Control` raises; others ask again then."""
        num_asked = self._num_asked
        async with self._turn:
            if self._answered > num_asked:
                return self._answer
            loop = asyncio.get_running_loop()
            if (pause_s := self._asked_at + PAUSE_S - loop.time()) > 0:
                await asyncio.sleep(pause_s)
            self._asked_at = loop.time()
            self._num_asked += 1
            number = self._num_asked
            self._answer = await self._control.connected_peers()
            self._answered = number
            return self._answer
