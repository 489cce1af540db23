"""Which servers compute the blocks of one call, and which of them have failed it already.

Leaves the choice of a chain to `router`. Used by one task at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SessionError, SwarmError
from swarm_protocol.records import ServeRecord

from swarm.network.membership import Membership
from swarm.router.routing import NoChain, find_chain
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.links import Links
from swarm.serving.session.recovery import Candidate

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between looks for a server that could take over."""

PATIENCE_S = 20.0
"""How long to look for one, or for room, before a call fails."""

MAX_FAILURES = 16
"""Of servers during one call: beyond that the call itself is what breaks them."""


class Search:
    """Of one call. `servers` are those known so far, all of one revision."""

    def __init__(
        self, membership: Membership, links: Links, model: ModelShape, servers: Mapping[str, ServeRecord], *, salt: str
    ) -> None:
        self._servers = servers
        self._membership = membership
        self._links = links
        self._model = model
        self._salt = salt
        self._failed: set[str] = set()
        self._num_failures = 0
        self._last: SwarmError | None = None
        self._give_up_at_s = asyncio.get_running_loop().time() + PATIENCE_S

    async def find(self, start: int, end: int) -> list[Candidate]:
        """The cheapest chain over `[start, end)`, of servers that have not failed this call.

        Raises NoChain, or why the last server would not or could not do it.
        """
        while True:
            outlook = self._links.outlook(self._servers, 1, self._salt)
            avoid = self._failed | set(outlook.avoid)
            try:
                chain = find_chain(self._servers, start, end, replace(outlook, avoid=avoid))
                return [Candidate(planned=hop, record=self._servers[hop.peer_id]) for hop in chain.hops]
            except NoChain:
                if asyncio.get_running_loop().time() >= self._give_up_at_s:
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
        try:
            servers = await self._membership.servers(self._model.name)
        except PeerTimeout as error:
            logger.info("looking up servers of %s: %s", self._model.name, error)
            return
        self._servers = {
            peer_id: record for peer_id, record in servers.items() if record.revision == self._model.revision
        }

    def failed(self, peer_id: str, error: SwarmError) -> None:
        """Do not ask it again in this call. Raises `error` if so many failed that the call itself must be at fault."""
        logger.info("%s failed a call on blocks of %s: %s", peer_id, self._model.name, error)
        # a refusal of this call says nothing of others
        if isinstance(error, PeerUnreachable | PeerTimeout | PeerViolation):
            self._links.failed(peer_id, error)
        self._failed.add(peer_id)
        self._last = error
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            raise error
