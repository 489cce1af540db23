"""Remembers the clients that wait for room at a full server, and tells them when a session has ended there.

Otherwise what is freed would be idle until one of them asks again. `peer_shares` decides which of those that ask get
room. To decide takes time, so it is done a bounded number of times a second for each provider's network, and for each
peer. The state belongs to `connection_server`.
"""

from __future__ import annotations

import asyncio

from swarm_protocol.errors import PeerRefused
from swarm_protocol.session_frames import RoomFreed

from swarm.network.peer_budgets import PeerPace, ProviderOf
from swarm.newest_items import NewestItems
from swarm.serving.peer_shares import MAX_WAITING, RETRY_AFTER_S, WAIT_S, Party, Sharer
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection

NUM_TOLD = 4
"""Clients that are told of each session that ends: some wait no longer, or for more room. The others ask when their
time has come."""

REFUSED_PER_S = 64.0
"""Refusals of one network in a second: those of 128 sessions that ask every RETRY_AFTER_S. Each takes up to 6 ms, if
a thousand keys wait."""

PEER_PART = 4
"""A peer may cause this part of its network's refusals, so that one that asks without end leaves room for others."""


class WaitingClients:
    """The connections on which a session was refused for lack of room in the last WAIT_S. Each is told once.

    Networks take turns, and in each network its peers, so that the keys of one network, however many, have one turn. A
    network that was refused REFUSED_PER_S just before is refused at once, and so is a peer at a PEER_PART of these.
    """

    def __init__(self, provider_of: ProviderOf) -> None:
        self._provider_of = provider_of
        self._refused_s: dict[MultiplexedConnection, float] = {}  # by time
        self._told = NewestItems[Party, int](MAX_WAITING)  # by network or peer, how many were told up to it
        self._num_told = 0
        self._pace = PeerPace[Party](per_s=REFUSED_PER_S, burst_s=RETRY_AFTER_S)

    def check(self, peer_id: str) -> None:
        """Raise PeerRefused if a peer or its network was refused too often just before."""
        if self._was_often_refused(peer_id):
            raise PeerRefused(
                "the server is full, and you or others of your network ask too often",
                remedy="ask another server, or later",
                retry_after_s=RETRY_AFTER_S,
                lacks_room=True,
            )

    def refused(self, connection: MultiplexedConnection) -> None:
        self.left(connection)
        self._refused_s[connection] = asyncio.get_running_loop().time()
        if not self._was_often_refused(connection.peer_id):  # else `check` has refused it, which took no time
            network, peer = self._parties(connection.peer_id)
            self._pace.count(network, 1)
            self._pace.count(peer, PEER_PART)

    def left(self, connection: MultiplexedConnection) -> None:
        """Forget a connection, which has ended."""
        self._refused_s.pop(connection, None)

    def tell(self) -> None:
        """Tell the next clients in turn that they may ask again, of one peer's the one that was refused longest ago."""
        since_s = asyncio.get_running_loop().time() - WAIT_S
        self._refused_s = {connection: at_s for connection, at_s in self._refused_s.items() if at_s > since_s}
        waiting = {each: Sharer(self._provider_of(each.peer_id), each.peer_id) for each in self._refused_s}
        for _ in range(min(NUM_TOLD, len(waiting))):
            # of equal ones the first, which was refused longest ago
            connection = min(waiting, key=lambda each: self._last_told(waiting[each]))
            sharer = waiting.pop(connection)
            self.left(connection)
            self._num_told += 1
            self._told[sharer[:1]] = self._told[sharer[:2]] = self._num_told
            if connection.error is None:
                connection.send(RoomFreed())

    def _was_often_refused(self, peer_id: str) -> bool:
        return any(self._pace.count(party, 0) > 0 for party in self._parties(peer_id))

    def _parties(self, peer_id: str) -> tuple[Party, Party]:
        """Return the network of a peer, and the peer in it."""
        sharer = Sharer(self._provider_of(peer_id), peer_id)
        return sharer[:1], sharer[:2]

    def _last_told(self, sharer: Sharer) -> tuple[int, int]:
        """Return when the network was told last, and when the peer was."""
        return self._told.get(sharer[:1], 0), self._told.get(sharer[:2], 0)
