"""What all sessions of one client share; closed with it."""

from __future__ import annotations

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.serving.session.connection_pool import ConnectionPool
from swarm.serving.session.peer_health import PeerHealth
from swarm.serving.session.replay_buffer import PrefixStore


class ClientState:
    """Connections to servers, what is known of their health, and the prefixes of earlier sessions."""

    def __init__(self, network: Network, membership: Membership) -> None:
        self.connections = ConnectionPool(network)
        self.health = PeerHealth(membership)
        self.prefixes = PrefixStore()

    async def close(self) -> None:
        await self.health.close()
        await self.connections.close()
