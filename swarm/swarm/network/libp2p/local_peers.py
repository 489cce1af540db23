"""Meets the nodes of the local network: those that `discovery.local_discovery` hears of, once they prove who they are.

What was heard may be a lie. So each local peer is dialled, where only the holder of its key can answer, and sends a
hello; few are dialled in a minute. `LocalPeers.run` is a task.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerError

from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.multiaddr import is_loopback

if TYPE_CHECKING:
    from swarm.network.discovery.local_discovery import LocalDiscovery

DIAL_EVERY_S = 3.0
"""Pause after each dial of a local peer that this node does not know yet: a liar on the local network cannot make it
dial more."""

RETRY_S = 60.0
"""Time until a local peer that was not reached is dialled again."""

KNOWN_FOR_S = 600.0
"""Time until one that was met is dialled again: the routing table may have no room for it."""

logger = logging.getLogger(__name__)


def start_discovery(
    options: Libp2pOptions, peer_id: str, own_addrs: Callable[[], Sequence[str]], tasks: asyncio.TaskGroup
) -> LocalDiscovery | None:
    """Begin to look for nodes in the local network, if this node is to be reached from there."""
    if not options.mdns or all(map(is_loopback, options.listen)):
        return None
    # a node without it need not import it
    from swarm.network.discovery.local_discovery import LocalDiscovery, local_addrs  # noqa: PLC0415

    discovery = LocalDiscovery(
        options.network_id,
        peer_id,
        lambda subnets: local_addrs(options.listen, own_addrs(), subnets),
        secret=options.invitation.network_secret if options.invitation else None,
    )
    tasks.create_task(discovery.run(), name="local discovery")
    return discovery


class Table(Protocol):
    """The part of the DHT that is used here."""

    def peers(self) -> tuple[str, ...]: ...

    async def ping(self, peer_id: str) -> bool: ...

    async def refresh(self) -> None: ...


class LocalPeers:
    """`reach` connects to a contact and checks that it is a node of this network, or raises PeerError. `on_met` is
    called when a local peer was met that this node did not know: the network may have been in two parts."""

    def __init__(
        self,
        discovery: LocalDiscovery,
        table: Table,
        reach: Callable[[Contact], Awaitable[object]],
        on_met: Callable[[], Awaitable[None]],
    ) -> None:
        self._discovery = discovery
        self._table = table
        self._reach = reach
        self._on_met = on_met
        self._again_at: dict[Contact, float] = {}  # by what was claimed: one claim of a peer may be a lie, another true

    def note_met(self, peer_ids: Collection[str]) -> None:
        """Note through which of its addresses each of these peers was reached already."""
        for contact in self._discovery.nearby.contacts:
            if contact.peer_id in peer_ids:
                self._discovery.nearby.reached(contact)

    async def run(self) -> None:
        while True:
            if strangers := self._strangers():
                await self._meet(random.choice(strangers))
                await asyncio.sleep(DIAL_EVERY_S)
            else:
                await self._discovery.heard()

    def _strangers(self) -> list[Contact]:
        now = asyncio.get_running_loop().time()
        self._again_at = {contact: at for contact, at in self._again_at.items() if at > now}
        known = set(self._table.peers())
        return [
            contact
            for contact in self._discovery.nearby.contacts
            if contact.peer_id not in known and contact not in self._again_at
        ]

    async def _meet(self, contact: Contact) -> None:
        now = asyncio.get_running_loop().time()
        self._again_at[contact] = now + RETRY_S
        try:
            await self._reach(contact)
        except PeerError as error:
            logger.info("a node of the local network cannot be met: %s at %s: %s", *_told(contact), error.message)
            return
        self._discovery.nearby.reached(contact)
        if await self._table.ping(contact.peer_id):
            self._again_at[contact] = now + KNOWN_FOR_S
            logger.info("met a node of the local network: %s at %s", *_told(contact))
            await self._table.refresh()
            await self._on_met()


def _told(contact: Contact) -> tuple[str, str]:
    return contact.peer_id, ", ".join(contact.addrs)
