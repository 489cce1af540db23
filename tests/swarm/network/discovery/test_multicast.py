"""Packets count only if a host of the same network sent them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import pytest
from support.memory_lan import segment, subnets
from swarm.network.discovery import multicast
from swarm.network.discovery.multicast import MulticastLink, Segment
from swarm.network.ip_kinds import IpAddress

LOOPBACK = Segment(
    interface="lo", source=ipaddress.IPv4Address("127.0.0.1"), subnets=subnets("127.0.0.1/8", interface="lo")
)
ELSEWHERE = segment("192.168.1.5/24")


def test_socket_receives_only_from_hosts_of_its_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: dict[Segment, int] = {}

    def open_socket(of: Segment) -> socket.socket:
        """Open a socket at a free port, since other programs of the machine may use port 5353."""
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.setblocking(False)
        opened.bind(("127.0.0.1", 0))
        ports[of] = opened.getsockname()[1]
        return opened

    monkeypatch.setattr(multicast, "_open_socket", open_socket)

    async def main() -> list[tuple[Segment, IpAddress, bytes]]:
        heard: list[tuple[Segment, IpAddress, bytes]] = []
        has_heard = asyncio.Event()

        def take(of: Segment, sender: IpAddress, packet: bytes) -> None:
            heard.append((of, sender, packet))
            has_heard.set()

        link = await MulticastLink.open([ELSEWHERE, LOOPBACK], take)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for of in (ELSEWHERE, LOOPBACK):
                sender.sendto(b"packet", ("127.0.0.1", ports[of]))
        async with asyncio.timeout(30):
            await has_heard.wait()
        await asyncio.sleep(0)  # the packet that was sent first has been received by now
        link.close()
        return heard

    assert asyncio.run(main()) == [(LOOPBACK, ipaddress.ip_address("127.0.0.1"), b"packet")]


def test_cancelled_opening_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []

    def open_socket(_of: Segment) -> socket.socket:
        opened.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        opened[-1].setblocking(False)
        opened[-1].bind(("127.0.0.1", 0))
        return opened[-1]

    monkeypatch.setattr(multicast, "_open_socket", open_socket)

    async def main() -> None:
        opening = asyncio.create_task(MulticastLink.open([ELSEWHERE, LOOPBACK], lambda *_: None))
        while len(opened) < 2:
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn

    asyncio.run(main())
    assert [each.fileno() for each in opened] == [-1, -1]


@pytest.mark.parametrize(
    ("sender", "is_from_here"), [("fe80::7", True), ("fd00::7", False), ("2001:db8::7", False), ("192.168.1.7", False)]
)
def test_packets_of_ip6_come_from_link_local_addresses(sender: str, is_from_here: bool) -> None:
    both = multicast.segments_of(subnets("192.168.1.5/24", "fd00::5/64"))
    assert both[1].source is None
    assert both[1].is_from_here(ipaddress.ip_address(sender)) is is_from_here
