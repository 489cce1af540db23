"""What all sessions of one client share; closed with it."""

from __future__ import annotations

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.serving.session.connection_pool import ConnectionPool
from swarm.serving.session.peer_health import Links
from swarm.serving.session.prefix_store import PrefixStore


class Shared:
    def __init__(self, network: Network, membership: Membership) -> None:
        self.lanes = ConnectionPool(network)
        self.links = Links(membership)
        self.store = PrefixStore()

    async def close(self) -> None:
        await self.links.close()
        await self.lanes.close()
