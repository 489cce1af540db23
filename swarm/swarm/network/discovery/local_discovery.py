"""Finds the nodes of one's own network that are in the same local network, and lets them find this one.

`LocalDiscovery.run` is a task: it asks by multicast DNS who is there, answers all who ask, and keeps what it heard of
others in `nearby`. What it hears are claims. Whether the peer is there shows when it is dialled: its id is in the
address, and libp2p lets nobody else answer. `LocalPeers.run` is a task that does that, for few peers in a minute. State
belongs to the tasks' loop; the link is an argument, so that tests run it without sockets and in virtual time.

No stranger in the local network can make a node forget the others (`NearbyPeers`). A sender of packets can name any
number of peers, and may name one that exists with addresses of its own choice. So each source address has few places,
what it says stands beside what others say, and when all places are taken, those go first that have the most. A claim by
which a peer was reached keeps its place while it is repeated.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerError
from swarm_protocol.network_invitation import NetworkSecret

from swarm.network.discovery.mdns_messages import MdnsQuery, answer, is_near, query, read_message, service_of
from swarm.network.discovery.multicast import Link, MulticastLink, OpenLink, Segment, segments_of
from swarm.network.discovery.own_networks import Subnet, own_subnets
from swarm.network.ip_kinds import IpAddress

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""Pause between two queries; it grows threefold. Who comes later asks, too, so this is for what was lost."""

ANSWER_EVERY_S = 1.0
"""Everyone hears an answer, so one a second is enough for any number of askers (RFC 6762, section 6)."""

MAX_PACKETS_PER_S = 100
"""Packets that are parsed. A hundred nodes that start at once stay below it."""

MAX_PACKETS_PER_SOURCE = 25
"""Packets that are parsed of one address. Ten nodes on a machine stay below it."""

FORGET_S = 3 * MAX_PAUSE_S
"""A local peer that answered none of three questions has left."""

SETTLE_S = 0.2
"""Time for further ones to answer once one has."""


MAX_CLAIMS = 64
"""One peer is enough to get in."""

MAX_PER_SOURCE = 8
"""A machine may run several nodes."""

DIAL_EVERY_S = 3.0
"""Pause after each dial of a local peer that this node does not know yet: a liar on the local network cannot make it
dial more."""

RETRY_S = 60.0
"""Time until a local peer that was not reached is dialled again."""

KNOWN_FOR_S = 600.0
"""Time until one that was met is dialled again: the routing table may have no room for it."""

logger = logging.getLogger(__name__)

_Key = tuple[IpAddress, str]


@dataclass(slots=True)
class _Claim:
    contact: Contact
    heard_at: float
    was_reached: bool = False


class NearbyPeers:
    """Remembers which peers were heard of in the local network, by the host that said so, within bounds."""

    def __init__(self) -> None:
        self._claims: OrderedDict[_Key, _Claim] = OrderedDict()  # by source and peer; the one heard last is last

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def contacts(self) -> tuple[Contact, ...]:
        """The peers and where they are said to be: one of each source, then a second one of each, and so on."""
        num_before: Counter[IpAddress] = Counter()
        ranked = []
        for (source, _), claim in self._claims.items():
            ranked.append((num_before[source], claim.contact))
            num_before[source] += 1
        return tuple(dict.fromkeys(contact for _, contact in sorted(ranked, key=lambda each: each[0])))

    def note(self, source: IpAddress, contact: Contact, now: float) -> None:
        """Take in what was said from an address. If all places are taken by claims that were right, it is dropped."""
        key = (source, contact.peer_id)
        if (known := self._claims.get(key)) is not None:
            known.was_reached &= known.contact == contact  # at other addresses it has proved nothing yet
            known.contact, known.heard_at = contact, now
            self._claims.move_to_end(key)
        elif self._make_room(source):
            self._claims[key] = _Claim(contact, now)

    def reached(self, contact: Contact) -> None:
        """Note that the peer has proved that it is there."""
        for claim in self._claims.values():
            claim.was_reached |= claim.contact == contact

    def forget(self, until: float) -> None:
        """Drop the claims that were not heard after `until`."""
        for key in [key for key, claim in self._claims.items() if claim.heard_at <= until]:
            del self._claims[key]

    def _make_room(self, source: IpAddress) -> bool:
        """Return whether there is a place for a claim of `source`, for which another one may have been dropped."""
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
        del self._claims[max(droppable, key=lambda key: nums[key[0]])]  # of equal ones the oldest
        return True


class LocalDiscovery:
    """`addrs` returns the addresses at which this node listens, without /p2p; those in a local network are told there.

    `subnets` returns those of this machine: it is asked again with each query, as interfaces come and go.
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
        self._asked_at: dict[Segment, float] = {}  # by anybody
        self._answer_at: dict[Segment, float] = {}  # the last answer, or the next one
        self._jitter = random.Random(peer_id)
        self._budget_at = 0.0
        self._num_packets: Counter[IpAddress] = Counter()  # in this second, of those that were parsed
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
                    # another's question was heard by all, and so were the answers
                    if pause_s < MAX_PAUSE_S or now() >= self._asked_at.get(segment, -pause_s) + pause_s / 2:
                        self._send(segment, query(self._service))
                await asyncio.sleep(pause_s * self._jitter.uniform(0.8, 1.0))
                pause_s = min(3 * pause_s, MAX_PAUSE_S)
        finally:
            if self._link is not None:
                self._link.close()

    async def first(self, *, timeout_s: float) -> tuple[Contact, ...]:
        """Wait for local peers, and return those that answered within SETTLE_S of the first; none in time: none."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.nearby:
                    await self.heard()
                await asyncio.sleep(SETTLE_S)
        except TimeoutError:
            pass
        return self.nearby.contacts

    async def heard(self) -> None:
        """Wait until a local peer is heard of from now on."""
        self._heard.clear()
        await self._heard.wait()

    async def _keep_link(self) -> None:
        """Follow the interfaces of this machine."""
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
        if not self._has_budget(sender):
            return
        said = read_message(packet, self._service, segment.subnets, self._secret)
        if isinstance(said, MdnsQuery):
            self._on_query(segment)
        elif said is not None and said.peer_id != self._peer_id:
            self.nearby.note(sender, said, asyncio.get_running_loop().time())
            self._heard.set()

    def _has_budget(self, sender: IpAddress) -> bool:
        now = asyncio.get_running_loop().time()
        if now >= self._budget_at + 1.0:
            self._budget_at = now
            self._num_packets.clear()
        if self._num_packets[sender] >= MAX_PACKETS_PER_SOURCE or self._num_packets.total() >= MAX_PACKETS_PER_S:
            return False
        self._num_packets[sender] += 1
        return True

    def _on_query(self, segment: Segment) -> None:
        """Answer at once, or as soon as the last answer was long enough ago for another."""
        loop = asyncio.get_running_loop()
        self._asked_at[segment] = loop.time()
        answer_at = self._answer_at.get(segment, 0.0)
        if answer_at > loop.time():
            return  # it is due already, and this asker will hear it
        answer_at = max(answer_at + ANSWER_EVERY_S, loop.time())
        self._answer_at[segment] = answer_at
        loop.call_at(answer_at, self._answer, segment)

    def _answer(self, segment: Segment) -> None:
        addrs = [addr for addr in self._addrs(segment.subnets) if is_near(addr, segment.subnets)]
        if addrs and segment in self._segments:
            self._send(segment, answer(self._service, self._peer_id, addrs, self._secret))


def local_addrs(listen: Sequence[str], known: Sequence[str], subnets: Sequence[Subnet]) -> tuple[str, ...]:
    """Return where local peers reach a node: its `known` addresses, and its `listen` addresses on these subnets.

    The latter count where others are told of another address than the one listened on, as behind a forwarded port.
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
