"""A local network in memory: every host receives each packet, its own included, and none is lost."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence

from swarm.network.discovery.multicast import Link, OnPacket, Segment, segments_of
from swarm.network.discovery.own_networks import Subnet

LATENCY_S = 0.001


class MemoryLan:
    """A local network that keeps all sent `packets`, oldest first."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self._hosts: list[tuple[Segment, OnPacket]] = []

    async def open(self, segments: Sequence[Segment], on_packet: OnPacket) -> Link:
        self._hosts += [(segment, on_packet) for segment in segments]
        return _Socket(self, on_packet)

    def send(self, packet: bytes, *, sender: str) -> None:
        """Send from an IP address, which may be outside this network."""
        self.packets.append(packet)
        source = ipaddress.ip_address(sender)
        for segment, on_packet in self._hosts:
            if segment.is_from_here(source):
                asyncio.get_running_loop().call_later(LATENCY_S, on_packet, segment, source, packet)

    def leave(self, on_packet: OnPacket) -> None:
        self._hosts = [host for host in self._hosts if host[1] != on_packet]


class _Socket:
    def __init__(self, lan: MemoryLan, on_packet: OnPacket) -> None:
        self._lan = lan
        self._on_packet = on_packet

    def send(self, segment: Segment, packet: bytes) -> None:
        self._lan.send(packet, sender=str(segment.source or "fe80::1"))

    def close(self) -> None:
        self._lan.leave(self._on_packet)


def subnets(*addresses: str, interface: str = "eth0", index: int = 1) -> tuple[Subnet, ...]:
    """Return the addresses of one interface, written like 192.168.1.5/24."""
    found = map(ipaddress.ip_interface, addresses)
    return tuple(Subnet(interface=interface, address=each.ip, network=each.network, index=index) for each in found)


def segment(*addresses: str) -> Segment:
    return segments_of(subnets(*addresses))[0]
