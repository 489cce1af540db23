"""The servers of one model and revision that a client knows of, looked up again when they do not suffice.

Used by one session or call, whose tasks share a loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from swarm_protocol.errors import PeerTimeout
from swarm_protocol.records import ServeRecord

from swarm.network.membership import Membership
from swarm.router import routing

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between looks for a server that could take over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A server for some blocks, and what it announced."""

    planned: routing.Hop
    record: ServeRecord


class KnownServers:
    """`servers` by peer id: at first those that are known already, all of this revision."""

    def __init__(
        self, membership: Membership, servers: Mapping[str, ServeRecord], *, model: str, revision: str
    ) -> None:
        self.servers = servers
        self.model = model
        self._others: Mapping[str, ServeRecord] = {}
        self._membership = membership
        self._revision = revision

    async def look_up(self) -> None:
        """Those that were known stay if nobody answers."""
        try:
            servers = await self._membership.servers(self.model)
        except PeerTimeout as error:
            logger.info("looking up servers of %s: %s", self.model, error)
            return
        self.servers = {peer_id: record for peer_id, record in servers.items() if record.revision == self._revision}
        self._others = {peer_id: record for peer_id, record in servers.items() if record.revision != self._revision}

    def find_chain(self, start: int, end: int, outlook: routing.Outlook) -> list[Candidate]:
        """The cheapest chain over `[start, end)`. Raises NoChain, which says so where other weights are served."""
        try:
            chain = routing.find_chain(self.servers, start, end, outlook)
        except routing.NoChain as error:
            raise routing.beside_others(error, self._revision, self._others) from None
        return [Candidate(planned=hop, record=self.servers[hop.peer_id]) for hop in chain.hops]
