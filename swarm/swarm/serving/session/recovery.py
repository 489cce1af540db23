"""Which servers could take blocks that nobody runs: routing over what a client knows, looked up again when that fails.

Leaves the choice of a chain to `router`, and what to do with it to `course`. Used by the tasks of one session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from swarm_protocol.errors import PeerTimeout
from swarm_protocol.records import ServeRecord

from swarm.network.membership import Membership
from swarm.router import routing
from swarm.router.routing import NoChain, find_chain
from swarm.serving.session.hop import Neighbours
from swarm.serving.session.links import Links

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between looks for a server that could take over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A server for some blocks, and what it announced."""

    planned: routing.Hop
    record: ServeRecord


class Finder:
    """Of one session with room for `max_tokens`. `servers` are those known so far, all of one revision."""

    def __init__(
        self,
        membership: Membership,
        links: Links,
        servers: Mapping[str, ServeRecord],
        *,
        model: str,
        revision: str,
        max_tokens: int,
        salt: str,
        patience_s: float,
    ) -> None:
        self._membership = membership
        self._links = links
        self._servers = servers
        self.model = model
        self._revision = revision
        self._max_tokens = max_tokens
        self._salt = salt
        self._patience_s = patience_s

    async def find(self, start: int, end: int, beside: Neighbours, *, since_s: float | None) -> list[Candidate]:
        """The cheapest chain over `[start, end)` beside these servers.

        Looked for until `patience_s` after `since_s`, or twice if that is None. Raises NoChain.
        """
        clock = asyncio.get_running_loop().time
        give_up_at_s = 0.0 if since_s is None else since_s + self._patience_s
        looked_up = False
        while True:
            try:
                outlook = self._links.outlook(
                    self._servers,
                    self._max_tokens,
                    self._salt,
                    previous_peer_id=beside.previous_peer_id,
                    next_peer_id=beside.next_peer_id,
                )
                chain = find_chain(self._servers, start, end, outlook)
            except NoChain:
                # what was known at the start of the session may be old
                if looked_up and clock() >= give_up_at_s:
                    raise
                await asyncio.sleep(RETRY_S if looked_up else 0)
                self._servers = await self._look_up()
                looked_up = True
            else:
                return [Candidate(planned=hop, record=self._servers[hop.peer_id]) for hop in chain.hops]

    async def _look_up(self) -> Mapping[str, ServeRecord]:
        try:
            servers = await self._membership.servers(self.model)
        except PeerTimeout as error:
            logger.info("looking up servers of %s: %s", self.model, error)
            return self._servers
        return {peer_id: record for peer_id, record in servers.items() if record.revision == self._revision}
