"""Which servers compute the blocks of one call, and which of them have failed it already.

Leaves the choice of a chain to `router`. Used by one task at a time.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SessionError, SwarmError

from swarm.router.routing import NoChain
from swarm.serving.session.known_servers import RETRY_S, Candidate, KnownServers
from swarm.serving.session.peer_health import Links
from swarm.serving.session.session_decisions import MAX_FAILURES

logger = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""How long to look for one, or for room, before a call fails."""


class Search:
    """Of one call."""

    def __init__(self, known: KnownServers, links: Links, *, salt: str) -> None:
        self._known = known
        self._links = links
        self._salt = salt
        self._failed: set[str] = set()
        self._num_failures = 0
        self._last: SwarmError | None = None
        self._give_up_at_s = asyncio.get_running_loop().time() + PATIENCE_S

    async def find(self, start: int, end: int) -> list[Candidate]:
        """The cheapest chain over `[start, end)`, of servers that have not refused this call.

        Raises NoChain, or why the last server would not or could not do it.
        """
        while True:
            outlook = self._links.outlook(self._known.servers, 1, self._salt)
            is_last = asyncio.get_running_loop().time() >= self._give_up_at_s
            barred = self._failed.union(outlook.avoid if is_last else outlook.barred)
            try:
                return self._known.find_chain(start, end, replace(outlook, barred=barred))
            except NoChain:
                if is_last:
                    raise
                await self._wait()

    async def _wait(self) -> None:
        """Until another look may find more. Raises what it is no use to wait for."""
        left_s = self._give_up_at_s - asyncio.get_running_loop().time()
        match self._last:
            case PeerRefused(retry_after_s=retry_after_s) if 0 < retry_after_s <= left_s:
                await asyncio.sleep(retry_after_s)
                self._failed.clear()
            case PeerRefused() | SessionError():
                raise self._last
            case _:
                await asyncio.sleep(RETRY_S)
        await self._known.look_up()

    def failed(self, peer_id: str, error: SwarmError) -> None:
        """Do not ask it again in this call. Raises `error` if so many failed that the call itself must be at fault."""
        logger.info("%s failed a call on blocks of %s: %s", peer_id, self._known.model, error)
        # a refusal of this call says nothing of others, and a server that could not be reached may come back
        if isinstance(error, PeerUnreachable | PeerTimeout | PeerViolation):
            self._links.failed(peer_id, error)
        else:
            self._failed.add(peer_id)
        self._last = error
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            raise error
