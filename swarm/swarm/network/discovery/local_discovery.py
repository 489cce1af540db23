"""Finds nodes of the same Swarm network in the local network, and lets them find this node.

`LocalDiscovery.run` is a task: it queries by multicast DNS, answers queries, and keeps what other nodes announce in
`nearby`. Announcements are claims. A dial shows whether the peer is there: the peer's id is in the address, and libp2p
accepts no other peer's answer. `LocalPeers.run` is a task that dials, only few peers a minute. State belongs to the
tasks' loop. The link is an argument, so that tests run without sockets and in virtual time.

No stranger in the local network can make a node forget the others (`NearbyPeers`). A sender of packets can announce any
number of peers, and wrong addresses for real peers. So each source address has few places, claims of different sources
about one peer are kept beside each other, and when all places are taken, a claim of the source with the most claims is
dropped. A claim by which a peer was reached keeps its place while it is repeated.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerError
from swarm_protocol.network_invitation import NetworkSecret

from swarm.network.discovery.mdns_messages import MdnsQuery, answer, is_near, query, read_message, service_of
from swarm.network.discovery.multicast import Link, MulticastLink, OpenLink, Segment, segments_of
from swarm.network.discovery.own_networks import Subnet, own_subnets
from swarm.network.ip_kinds import IpAddress
from swarm.network.peer_budgets import PeerRateLimit

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""Pause between two queries; each pause is three times the last one. Later nodes send queries themselves, so repeated
queries only make up for lost packets."""

ANSWER_EVERY_S = 1.0
"""Minimum time between two answers. All nodes receive an answer, so one a second is enough for any number of queries
(RFC 6762, section 6)."""

MAX_PACKETS_PER_S = 100
"""Maximum packets parsed in a second. A hundred nodes that start at once stay below it."""

MAX_PACKETS_PER_SOURCE = 25
"""Maximum packets of one address parsed in a second. Ten nodes on one machine stay below it."""

FORGET_S = 3 * MAX_PAUSE_S
"""Time after which a local peer that answered no query is forgotten: it missed three queries."""

SETTLE_S = 0.2
"""Time for further peers to answer once one has."""


MAX_CLAIMS = 64
"""Maximum claims that are kept. One peer is enough to join."""

MAX_PER_SOURCE = 8
"""Maximum claims of one source address, since a machine may run several nodes."""

DIAL_EVERY_S = 3.0
"""Pause after each dial to an unknown local peer, so that a liar in the local network cannot make this node dial more
often."""

RETRY_S = 60.0
"""Time until a local peer that was not reached is dialled again."""

KNOWN_FOR_S = 600.0
"""Time until a local peer that was met is dialled again, if the routing table had no room for it."""

logger = logging.getLogger(__name__)

_Key = tuple[IpAddress, str]


@dataclass(slots=True)
class _Claim:
    contact: Contact
    heard_at: float
    was_reached: bool = False


class NearbyPeers:
    """Remembers which peers were announced in the local network, by source address, within bounds."""

    def __init__(self) -> None:
        self._claims: OrderedDict[_Key, _Claim] = OrderedDict()  # by source and peer, in the order of their last packet

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def contacts(self) -> tuple[Contact, ...]:
        """The announced contacts: the first of each source, then the second of each, and so on."""
        num_before: Counter[IpAddress] = Counter()
        ranked = []
        for (source, _), claim in self._claims.items():
            ranked.append((num_before[source], claim.contact))
            num_before[source] += 1
        return tuple(dict.fromkeys(contact for _, contact in sorted(ranked, key=lambda each: each[0])))

    def note(self, source: IpAddress, contact: Contact, now: float) -> None:
        """Note a claim from a source address. The claim is dropped if no earlier one may be dropped for it."""
        key = (source, contact.peer_id)
        if (known := self._claims.get(key)) is not None:
            known.was_reached &= known.contact == contact  # other addresses were not confirmed yet
            known.contact, known.heard_at = contact, now
            self._claims.move_to_end(key)
        elif self._make_room(source):
            self._claims[key] = _Claim(contact, now)

    def reached(self, contact: Contact) -> None:
        """Note that the peer was reached at its claimed addresses."""
        for claim in self._claims.values():
            claim.was_reached |= claim.contact == contact

    def forget(self, until: float) -> None:
        """Drop the claims that were not repeated after the time `until`."""
        for key in [key for key, claim in self._claims.items() if claim.heard_at <= until]:
            del self._claims[key]

    def _make_room(self, source: IpAddress) -> bool:
        """Return whether there is a place for a claim of `source`, after dropping another claim if need be."""
        nums = Counter(each for each, _ in self._claims)
        if nums[source] < MAX_PER_SOURCE and len(self._claims) < MAX_CLAIMS:
            return True
        droppable = [
            key
            for key, claim in self._claims.items()
            if not claim.was_reached and (nums[source] < MAX_PER_SOURCE or key[0] == source)
        ]
        if not droppable:
            return False
        del self._claims[max(droppable, key=lambda key: nums[key[0]])]  # the oldest one of such a source
        return True


class LocalDiscovery:
    """Asks for nodes in the local networks, and announces this node there.

    `addrs` returns the addresses at which this node listens, without /p2p; those in a local network are announced in
    it. `subnets` returns this machine's subnets, and is called again before each query, since interfaces come and go.
    """

    def __init__(
        self,
        network_id: str,
        peer_id: str,
        addrs: Callable[[Sequence[Subnet]], Sequence[str]],
        *,
        secret: NetworkSecret | None = None,
        subnets: Callable[[], Sequence[Subnet]] = own_subnets,
        open_link: OpenLink = MulticastLink.open,
    ) -> None:
        self._service = service_of(network_id, secret)
        self._secret = secret
        self._peer_id = peer_id
        self._addrs = addrs
        self._subnets = subnets
        self._open_link = open_link
        self._segments: tuple[Segment, ...] = ()
        self._link: Link | None = None
        self._heard = asyncio.Event()
        self._asked_at: dict[Segment, float] = {}  # the last query of another node
        self._answer_at: dict[Segment, float] = {}  # the last answer of this node, or the next one if it is due
        self._jitter = random.Random(peer_id)
        self._packets = PeerRateLimit[IpAddress](
            period_s=1.0, per_peer=MAX_PACKETS_PER_SOURCE, in_all=MAX_PACKETS_PER_S
        )
        self.nearby = NearbyPeers()

    async def run(self) -> None:
        """Ask and answer until cancelled."""
        now = asyncio.get_running_loop().time
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                await self._keep_link()
                self.nearby.forget(now() - FORGET_S)
                for segment in self._segments:
                    # all nodes hear another node's query and its answers
                    if pause_s < MAX_PAUSE_S or now() >= self._asked_at.get(segment, -pause_s) + pause_s / 2:
                        self._send(segment, query(self._service))
                await asyncio.sleep(pause_s * self._jitter.uniform(0.8, 1.0))
                pause_s = min(3 * pause_s, MAX_PAUSE_S)
        finally:
            if self._link is not None:
                self._link.close()

    async def first(self, *, timeout_s: float) -> tuple[Contact, ...]:
        """Wait up to `timeout_s` for a local peer, then SETTLE_S for further ones, and return the contacts."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.nearby:
                    await self.heard()
                await asyncio.sleep(SETTLE_S)
        except TimeoutError:
            pass
        return self.nearby.contacts

    async def heard(self) -> None:
        """Wait until another claim about a local peer comes in."""
        self._heard.clear()
        await self._heard.wait()

    async def _keep_link(self) -> None:
        """Open the link again if this machine's interfaces have changed."""
        segments = segments_of(self._subnets())
        if segments == self._segments and self._link is not None:
            return
        if self._link is not None:
            self._link.close()
        self._segments, self._asked_at, self._answer_at = segments, {}, {}
        self._link = await self._open_link(segments, self._take)

    def _send(self, segment: Segment, packet: bytes) -> None:
        if self._link is not None:
            self._link.send(segment, packet)

    def _take(self, segment: Segment, sender: IpAddress, packet: bytes) -> None:
        if not self._packets.takes(sender):
            return
        said = read_message(packet, self._service, segment.subnets, self._secret)
        if isinstance(said, MdnsQuery):
            self._on_query(segment)
        elif said is not None and said.peer_id != self._peer_id:
            self.nearby.note(sender, said, asyncio.get_running_loop().time())
            self._heard.set()

    def _on_query(self, segment: Segment) -> None:
        """Answer a query at once, or ANSWER_EVERY_S after the last answer."""
        loop = asyncio.get_running_loop()
        self._asked_at[segment] = loop.time()
        answer_at = self._answer_at.get(segment, 0.0)
        if answer_at > loop.time():
            return  # an answer is due already, which this asker will hear
        answer_at = max(answer_at + ANSWER_EVERY_S, loop.time())
        self._answer_at[segment] = answer_at
        loop.call_at(answer_at, self._answer, segment)

    def _answer(self, segment: Segment) -> None:
        addrs = [addr for addr in self._addrs(segment.subnets) if is_near(addr, segment.subnets)]
        if addrs and segment in self._segments:
            self._send(segment, answer(self._service, self._peer_id, addrs, self._secret))


def local_addrs(listen: Sequence[str], known: Sequence[str], subnets: Sequence[Subnet]) -> tuple[str, ...]:
    """Return the addresses at which local peers reach a node: its `known` ones, and its `listen` addresses on
    `subnets`.

    The latter are needed if the node announces another address than it listens on, as behind a forwarded port.
    """
    found = dict.fromkeys(known)
    for addr in listen:
        _, version, host, transport, port, *more = addr.split("/")
        if port == "0":
            continue
        for subnet in subnets:
            is_any = host in ("0.0.0.0", "::") and version == f"ip{subnet.address.version}"  # noqa: S104 - compared
            if is_any or host == str(subnet.address):
                found["/".join(("", f"ip{subnet.address.version}", str(subnet.address), transport, port, *more))] = None
    return tuple(found)


class Table(Protocol):
    """The part of the DHT that this module uses."""

    def peers(self) -> tuple[str, ...]: ...

    async def ping(self, peer_id: str) -> bool: ...

    async def refresh(self) -> None: ...


class LocalPeers:
    """Dials local peers that are not in the routing table.

    `reach` connects to a contact and checks that it is a node of this network, or raises PeerError. `on_met` is called
    after an unknown local peer was met: the network may have been in two parts.
    """

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
        self._again_at: dict[Contact, float] = {}  # by claim, since of two claims about a peer one may be a lie

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
            logger.info(
                "cannot reach a node of the local network: %s at %s: %s", *_id_and_addrs(contact), error.message
            )
            return
        self._discovery.nearby.reached(contact)
        if await self._table.ping(contact.peer_id):
            self._again_at[contact] = now + KNOWN_FOR_S
            logger.info("met a node of the local network: %s at %s", *_id_and_addrs(contact))
            await self._table.refresh()
            await self._on_met()


def _id_and_addrs(contact: Contact) -> tuple[str, str]:
    return contact.peer_id, ", ".join(contact.addrs)
