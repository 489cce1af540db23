"""Helps peers to learn at which addresses they are reached: says where this node sees them, and dials them back.

A dial comes from a temporary host, since this node's own host has a connection already; libp2p lets a dial succeed only
if the peer's key answers. Only the IP at which this node sees the asker is dialled, so that nobody can have other
machines scanned or flooded.

Dials back are bounded, since each starts a libp2p daemon, a tenth of a second of work. A peer waits for one at a time
and gets few in a minute, which is enough for a node whose addresses change. Since peer ids cost nothing, those for all
peers together are bounded, too, to at most a tenth of one core, and those for the peers of one network to half of that.
These take turns among themselves before they wait for the turn of all. A peer that is refused asks another one.

State belongs to the network's loop. `address_survey` is the side that asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from weakref import WeakValueDictionary

from swarm_protocol.errors import PeerViolation, StartError
from swarm_protocol.path_messages import PathAddrs, PathAnswer

from swarm.network.ip_kinds import IpNetwork, provider_network_of
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.multiaddr import dialable, ip_of, is_private, is_tcp_by_ip
from swarm.network.paths.introductions import REFUSED
from swarm.network.peer_budgets import PeerRateLimit

logger = logging.getLogger(__name__)

OBSERVE = "paths/observe"
DIAL_BACK = "paths/dial_back"

ASK_S = 6.0
"""Time for an answer."""
DIAL_S = 2.0
"""Time for the dials of one IP version: twice across the world, and a SYN that was lost."""
MAX_ADDRS = 4
"""Maximum addresses that are told, or dialled back, for one request."""
TURN_S = ASK_S - 2 * DIAL_S
"""Time that a request for a dial back waits for its turn. After a longer wait the answer would come too late."""

MAX_WAITING = 16
"""Maximum peers that wait for a dial back at the same time. They are served one after the other."""

PERIOD_S = 60.0
MAX_PER_PEER = 5
MAX_PER_PERIOD = 60
MAX_PER_NETWORK = MAX_PER_PERIOD // 2


class PeerAddresses:
    """Answers peers that ask for their addresses. `carried` are peers of which this node sees a wrong address, and
    `seen_at()` the addresses at which others see this node."""

    def __init__(
        self, host: Host, prefix: str, *, carried: Collection[str], seen_at: Callable[[], Collection[str]]
    ) -> None:
        self._host = host
        self._prefix = prefix
        self._carried = carried
        self._seen_at = seen_at
        self._turn = asyncio.Lock()
        self._turns = WeakValueDictionary[IpNetwork, asyncio.Lock]()  # those of each network
        self._waiting: set[str] = set()
        self._limit = PeerRateLimit[str](
            period_s=PERIOD_S, per_peer=MAX_PER_PEER, per_network=MAX_PER_NETWORK, in_all=MAX_PER_PERIOD
        )

    async def serve(self) -> None:
        await self._host.serve(self._prefix + OBSERVE, self._observe)
        await self._host.serve(self._prefix + DIAL_BACK, self._dial_back)

    async def _observe(self, peer_id: str, _request: bytes) -> bytes:
        seen = await self._seen(peer_id)
        return PathAnswer(agreed=bool(seen), addrs=seen).to_bytes()

    async def _dial_back(self, peer_id: str, data: bytes) -> bytes:
        try:
            claims = PathAddrs.from_bytes(data).addrs
        except PeerViolation:
            return REFUSED
        ips = {ip for addr in await self._seen(peer_id) if (ip := ip_of(addr))}
        usable = [addr for addr in dialable(claims) if is_tcp_by_ip(addr) and ip_of(addr) in ips][:MAX_ADDRS]
        is_neighbour = bool(ips & set(map(ip_of, self._seen_at()))) and not any(map(is_private, usable))
        # a dial behind the same NAT does not show whether others can dial
        if not usable or is_neighbour:
            return REFUSED
        network = provider_network_of(next(iter(ips)))
        if not self._may_wait(peer_id, network):
            return REFUSED
        self._waiting.add(peer_id)
        turn = self._turns.setdefault(network, asyncio.Lock())
        try:
            async with asyncio.timeout(TURN_S) as waiting, turn, self._turn:
                waiting.reschedule(None)
                reached = await _dial_each(peer_id, usable)
        except TimeoutError:
            return REFUSED
        except StartError as error:
            logger.warning("cannot dial back: %s", error)
            return REFUSED
        finally:
            self._waiting.discard(peer_id)
        return PathAnswer(agreed=True, addrs=tuple(reached)).to_bytes()

    def _may_wait(self, peer_id: str, network: IpNetwork) -> bool:
        is_free = peer_id not in self._waiting and len(self._waiting) < MAX_WAITING
        return is_free and self._limit.takes(peer_id, network)

    async def _seen(self, peer_id: str) -> tuple[str, ...]:
        """Return the addresses at which this node sees a peer; none if the peer is connected only through relays."""
        if peer_id in self._carried:
            return ()
        return tuple(filter(is_tcp_by_ip, (await self._host.connected_peers()).get(peer_id, ())))[:MAX_ADDRS]


async def _dial_each(peer_id: str, addrs: Sequence[str]) -> list[str]:
    """Dial `addrs` from a temporary host, and return those that led to a connection, for each IP version.

    Raises StartError.
    """
    host = await Host.start(DaemonOptions())
    reached: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.unary.run(), name="dial back")
        try:
            for version in sorted({addr[: len("/ip4/")] for addr in addrs}):
                dialled = [addr for addr in addrs if addr.startswith(version)]
                try:
                    async with asyncio.timeout(DIAL_S):
                        await host.control.connect(peer_id, dialled)
                        found = (await host.control.connected_peers()).get(peer_id, ())
                        reached.extend(addr for addr in dialled if addr in found)
                        await host.control.disconnect(peer_id)
                except (*CONTROL_FAILURES, TimeoutError) as error:
                    logger.info("%s is not reached at %s: %s", peer_id, dialled, error)
        finally:
            await host.stop()  # this ends `host.unary.run`, too
    return reached
