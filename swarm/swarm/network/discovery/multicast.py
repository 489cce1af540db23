"""Sockets for multicast DNS: one for each local network of an interface, and the choice of these networks.

A packet is accepted only if its sender is in the network of the socket. `MulticastLink` owns the sockets, and
`local_discovery` decides what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from swarm.network.discovery.own_networks import Subnet
from swarm.network.ip_kinds import IpAddress, kind_of

PORT = 5353
_GROUP_IP4 = "224.0.0.251"
_GROUP_IP6 = "ff02::fb"
_LINK_LOCAL = ipaddress.ip_network("fe80::/10")

MAX_SEGMENTS = 16
"""Maximum segments: a machine with many containers has many bridges, each with a network of its own."""

_IP_MULTICAST_ALL = 49
_IPV6_MULTICAST_ALL = 29
"""Options of Linux that Python does not name. They keep a socket from receiving packets of groups that only other
sockets of the machine have joined."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A local network to which packets are sent: by IPv4 from `source`, or by IPv6 if `source` is None.

    `subnets` are all subnets of this machine on the interface, of both IP versions.
    """

    interface: str
    source: ipaddress.IPv4Address | None
    subnets: tuple[Subnet, ...]

    def is_from_here(self, sender: IpAddress) -> bool:
        """Return whether `sender` is the address of a host in this network."""
        if self.source is None:
            return sender in _LINK_LOCAL
        return any(sender in subnet.network for subnet in self.subnets if subnet.address == self.source)


OnPacket = Callable[[Segment, IpAddress, bytes], None]
"""`on_packet(segment, sender, packet)`"""


class Link(Protocol):
    """The local networks of this machine, as `local_discovery` uses them."""

    def send(self, segment: Segment, packet: bytes) -> None:
        """Send a packet to all hosts of a segment. Do nothing if that fails."""

    def close(self) -> None: ...


OpenLink = Callable[[Sequence[Segment], OnPacket], Awaitable[Link]]


def segments_of(subnets: Iterable[Subnet]) -> tuple[Segment, ...]:
    """Return the networks in which to look for local peers: those with private or link-local addresses."""
    by_interface: dict[str, list[Subnet]] = {}
    for subnet in subnets:
        if kind_of(subnet.address) in ("private", "link-local"):
            by_interface.setdefault(subnet.interface, []).append(subnet)
    found = []
    for interface, those in by_interface.items():
        together = tuple(those)
        for subnet in those:
            if isinstance(subnet.address, ipaddress.IPv4Address):
                found.append(Segment(interface=interface, source=subnet.address, subnets=together))
        if any(subnet.address.version == 6 for subnet in those):
            found.append(Segment(interface=interface, source=None, subnets=together))
    return tuple(found[:MAX_SEGMENTS])


class MulticastLink:
    """Implements `Link`."""

    def __init__(self) -> None:
        self._transports: dict[Segment, asyncio.DatagramTransport] = {}

    @classmethod
    async def open(cls, segments: Sequence[Segment], on_packet: OnPacket) -> MulticastLink:
        """Open the segments. A segment that cannot be opened is left out, since its interface may be about to
        vanish."""
        link = cls()
        loop = asyncio.get_running_loop()
        try:
            for segment in segments:
                receiver = partial(_Receiver, segment, on_packet)
                try:
                    transport, _ = await loop.create_datagram_endpoint(receiver, sock=_open_socket(segment))
                except OSError as error:
                    logger.info("no multicast on %s: %s", segment.interface, error)
                else:
                    link._transports[segment] = transport
        except BaseException:  # cancelled
            link.close()
            raise
        return link

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments that were opened."""
        return tuple(self._transports)

    def send(self, segment: Segment, packet: bytes) -> None:
        if (transport := self._transports.get(segment)) is not None:
            with contextlib.suppress(OSError):
                transport.sendto(packet, _group(segment))

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, segment: Segment, on_packet: OnPacket) -> None:
        self._segment = segment
        self._on_packet = on_packet

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        try:
            sender = ipaddress.ip_address(str(addr[0]).partition("%")[0])
        except ValueError:
            return
        if self._segment.is_from_here(sender):
            self._on_packet(self._segment, sender, data)

    def error_received(self, exc: Exception) -> None:
        logger.debug("multicast on %s: %s", self._segment.interface, exc)


def _group(segment: Segment) -> tuple[Any, ...]:
    if segment.source is not None:
        return _GROUP_IP4, PORT
    return _GROUP_IP6, PORT, 0, socket.if_nametoindex(segment.interface)


def _open_socket(segment: Segment) -> socket.socket:
    """Open and join a segment's multicast group. Raises OSError."""
    opened = socket.socket(socket.AF_INET if segment.source else socket.AF_INET6, socket.SOCK_DGRAM)
    try:
        opened.setblocking(False)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):  # other programs of this machine use the port, too
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        (_join_ip4 if segment.source else _join_ip6)(opened, segment)
    except BaseException:
        opened.close()
        raise
    return opened


def _join_ip4(opened: socket.socket, segment: Segment) -> None:
    assert segment.source is not None
    source = segment.source.packed
    opened.bind(("", PORT))
    with contextlib.suppress(OSError):
        opened.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
    opened.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_GROUP_IP4) + source)
    opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, source)
    opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
    opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)


def _join_ip6(opened: socket.socket, segment: Segment) -> None:
    index = socket.if_nametoindex(segment.interface)
    opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    opened.bind(("::", PORT))
    with contextlib.suppress(OSError):
        opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_MULTICAST_ALL, 0)
    group = socket.inet_pton(socket.AF_INET6, _GROUP_IP6) + struct.pack("@I", index)
    opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
    opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
    opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
    opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
