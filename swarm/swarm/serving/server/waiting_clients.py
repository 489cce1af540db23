"""Remembers the clients that wait for room at a full server, and tells them when a session has ended there.

Otherwise what is freed would be idle until one of them asks again. `peer_shares` decides which of those that ask get
room. The state belongs to `connection_server`.
"""

from __future__ import annotations

import asyncio

from swarm_protocol.session_frames import RoomFreed

from swarm.serving.peer_shares import WAIT_S
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection

NUM_TOLD = 4
"""Clients that are told of each session that ends: some wait no longer, or for more room. The others ask when their
time has come."""


class WaitingClients:
    """The connections on which a session was refused for lack of room in the last WAIT_S. Each is told once."""

    def __init__(self) -> None:
        self._refused_s: dict[MultiplexedConnection, float] = {}  # by time

    def refused(self, connection: MultiplexedConnection) -> None:
        self.left(connection)
        self._refused_s[connection] = asyncio.get_running_loop().time()

    def left(self, connection: MultiplexedConnection) -> None:
        """Forget a connection, which has ended."""
        self._refused_s.pop(connection, None)

    def tell(self) -> None:
        """Tell the clients that were refused longest ago that they may ask again."""
        since_s = asyncio.get_running_loop().time() - WAIT_S
        self._refused_s = {connection: at_s for connection, at_s in self._refused_s.items() if at_s > since_s}
        for connection in list(self._refused_s)[:NUM_TOLD]:
            self.left(connection)
            if connection.error is None:
                connection.send(RoomFreed())
