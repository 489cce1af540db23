"""Nodes of one local network find each other, with liars among them: in memory and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from support.memory_lan import MemoryLan, subnets
from swarm.network.discovery import local_discovery
from swarm.network.discovery.local_discovery import (
    DIAL_EVERY_S,
    FORGET_S,
    KNOWN_FOR_S,
    MAX_PACKETS_PER_S,
    MAX_PACKETS_PER_SOURCE,
    MAX_PAUSE_S,
    MAX_PER_SOURCE,
    RETRY_S,
    LocalDiscovery,
    LocalPeers,
    local_addrs,
)
from swarm.network.discovery.mdns_messages import answer, query, service_of
from swarm.network.discovery.multicast import MAX_SEGMENTS, Link, OnPacket, Segment, segments_of
from swarm.network.discovery.own_networks import Subnet
from swarm.testing import virtual_time
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity

NETWORK_ID = "swarm"
SERVICE = service_of(NETWORK_ID)


def peer(number: int) -> str:
    return Identity(number.to_bytes(2, "big") * 16).peer_id


def contact(number: int) -> Contact:
    return Contact(peer_id=peer(number), addrs=(f"/ip4/192.168.1.{number}/tcp/4001",))


def host(lan: MemoryLan, number: int, network_id: str = NETWORK_ID, *more: str) -> LocalDiscovery:
    """Return the node with address 192.168.1.`number`."""
    here = subnets(f"192.168.1.{number}/24", *more)
    return LocalDiscovery(
        network_id, peer(number), lambda _: contact(number).addrs, subnets=lambda: here, open_link=lan.open
    )


def in_lan(case: Callable[[MemoryLan, asyncio.TaskGroup], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            case_task = tasks.create_task(case(MemoryLan(), tasks))  # type: ignore[arg-type]
            await case_task
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    virtual_time.run(main())


def test_nodes_of_one_network_find_each_other_at_once() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        a, b, stranger = host(lan, 1), host(lan, 2), host(lan, 3, "other")
        for each in (a, b, stranger):
            tasks.create_task(each.run())
        assert await b.first(timeout_s=3) == (contact(1),)
        assert await a.first(timeout_s=3) == (contact(2),)
        assert await stranger.first(timeout_s=3) == ()

    in_lan(case)


def test_newcomer_and_other_nodes_find_each_other_at_once() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        old = host(lan, 1)
        tasks.create_task(old.run())
        await asyncio.sleep(3600)
        new = host(lan, 2)
        tasks.create_task(new.run())
        await asyncio.sleep(0.1)
        assert new.nearby.contacts == (contact(1),)
        assert old.nearby.contacts == (contact(2),)

    in_lan(case)


def test_node_that_has_left_is_forgotten_and_one_that_stays_is_not() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        node = host(lan, 1)
        tasks.create_task(node.run())
        tasks.create_task(host(lan, 2).run())
        leaving = tasks.create_task(host(lan, 3).run())
        await asyncio.sleep(1000)
        assert set(node.nearby.contacts) == {contact(2), contact(3)}
        leaving.cancel()
        await asyncio.sleep(FORGET_S + 2 * MAX_PAUSE_S)
        assert node.nearby.contacts == (contact(2),)

    in_lan(case)


def test_many_nodes_query_hardly_more_often_than_one() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        for number in range(1, 9):
            tasks.create_task(host(lan, number).run())
        await asyncio.sleep(300)
        lan.packets.clear()
        await asyncio.sleep(1800)
        num_queries = sum(packet == query(SERVICE) for packet in lan.packets)
        assert 1800 / MAX_PAUSE_S - 5 < num_queries < 3 * 1800 / MAX_PAUSE_S

    in_lan(case)


def test_flood_of_queries_is_answered_once_a_second() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(host(lan, 1).run())
        await asyncio.sleep(500)
        lan.packets.clear()
        for _ in range(1000):
            lan.send(query(SERVICE), sender="192.168.1.66")
            await asyncio.sleep(0.01)
        assert sum(packet != query(SERVICE) for packet in lan.packets) <= 11

    in_lan(case)


def test_flood_of_answers_is_bounded_in_number_and_work_and_delays_no_other_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_read = 0
    really_read = local_discovery.read_message

    def read(packet: bytes, service: str, here: Sequence[Subnet], secret: None) -> object:
        nonlocal num_read
        num_read += 1
        return really_read(packet, service, here, secret)

    monkeypatch.setattr(local_discovery, "read_message", read)

    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        nonlocal num_read
        node = host(lan, 1)
        tasks.create_task(node.run())
        await asyncio.sleep(500)
        num_read = 0
        for number in range(2, 500):
            lan.send(answer(SERVICE, peer(number), ["/ip4/192.168.1.9/tcp/1"]), sender="192.168.1.66")
        lan.send(answer(SERVICE, peer(500), contact(7).addrs), sender="192.168.1.7")
        await asyncio.sleep(0.5)
        assert num_read <= MAX_PACKETS_PER_SOURCE + 1
        assert len(node.nearby) == MAX_PER_SOURCE + 1
        assert Contact(peer_id=peer(500), addrs=contact(7).addrs) in node.nearby.contacts
        num_read = 0
        await asyncio.sleep(1)
        for number in range(2, 250):
            lan.send(answer(SERVICE, peer(number), contact(number).addrs), sender=f"192.168.1.{number}")
        await asyncio.sleep(0.5)
        assert num_read == MAX_PACKETS_PER_S

    in_lan(case)


def test_packets_from_outside_the_subnet_are_ignored() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        node = host(lan, 1)
        tasks.create_task(node.run())
        await asyncio.sleep(0.1)
        for sender in ("198.51.100.6", "192.168.2.6", "127.0.0.1"):
            lan.send(answer(SERVICE, peer(2), contact(2).addrs), sender=sender)
        assert await node.first(timeout_s=1) == ()
        lan.send(answer(SERVICE, peer(2), contact(2).addrs), sender="192.168.1.66")
        assert await node.first(timeout_s=1) == (contact(2),)

    in_lan(case)


def test_interfaces_that_come_and_go_are_followed() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        here: list[tuple[Subnet, ...]] = [()]
        moving = LocalDiscovery(
            NETWORK_ID, peer(2), lambda _: contact(2).addrs, subnets=lambda: here[0], open_link=lan.open
        )
        fixed = host(lan, 1)
        tasks.create_task(fixed.run())
        tasks.create_task(moving.run())
        assert await moving.first(timeout_s=30) == ()
        here[0] = subnets("192.168.1.2/24")
        await asyncio.sleep(MAX_PAUSE_S + 1)
        assert moving.nearby.contacts == (contact(1),)
        assert fixed.nearby.contacts == (contact(2),)

    in_lan(case)


def test_interface_gets_new_sockets_when_it_returns_with_its_address() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        here = [subnets("192.168.1.2/24", index=2)]
        opened: list[int] = []

        async def open_link(segments: Sequence[Segment], on_packet: OnPacket) -> Link:
            opened.append(segments[0].subnets[0].index)
            return await lan.open(segments, on_packet)

        node = LocalDiscovery(NETWORK_ID, peer(2), lambda _: (), subnets=lambda: here[0], open_link=open_link)
        tasks.create_task(node.run())
        await asyncio.sleep(3 * MAX_PAUSE_S)
        here[0] = subnets("192.168.1.2/24", index=3)
        await asyncio.sleep(3 * MAX_PAUSE_S)
        assert opened == [2, 3]

    in_lan(case)


def test_segments_leave_out_public_and_loopback_addresses() -> None:
    assert segments_of(subnets("127.0.0.1/8", "::1/128", interface="lo")) == ()
    assert segments_of(subnets("198.51.100.5/24", "2001:db8::5/64")) == ()
    both = segments_of(subnets("192.168.1.5/24", "fe80::5/64", "2001:db8::5/64"))
    assert [str(each.source) for each in both] == ["192.168.1.5", "None"]
    assert all(len(each.subnets) == 2 for each in both)
    many = [each for number in range(40) for each in subnets(f"10.0.{number}.1/24", interface=f"br{number}")]
    assert len(segments_of(many)) == MAX_SEGMENTS


def test_local_addrs_are_the_listen_addresses_whatever_is_announced() -> None:
    here = subnets("192.168.1.5/24", "fd00::5/64")
    listen = ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001", "/ip4/0.0.0.0/tcp/0", "/ip4/10.0.0.1/tcp/1")
    assert local_addrs(listen, ["/dns4/seed.example.org/tcp/4001"], here) == (
        "/dns4/seed.example.org/tcp/4001",
        "/ip4/192.168.1.5/tcp/4001",
        "/ip6/fd00::5/tcp/4001",
    )
    assert local_addrs(("/ip4/192.168.1.5/tcp/7",), [], here) == ("/ip4/192.168.1.5/tcp/7",)


class FakePeerTable:
    """A table of peers that says which of them can be reached."""

    def __init__(self, *reachable: int) -> None:
        self.reachable = {peer(number) for number in reachable}
        self.known: set[str] = set()
        self.dialled: list[tuple[float, str]] = []
        self.num_met = 0

    def peers(self) -> tuple[str, ...]:
        return tuple(self.known)

    async def ping(self, peer_id: str) -> bool:
        self.known.add(peer_id)
        return True

    async def refresh(self) -> None:
        return None

    async def reach(self, found: Contact) -> None:
        self.dialled.append((asyncio.get_running_loop().time(), found.peer_id))
        if found.peer_id not in self.reachable:
            raise PeerUnreachable("another peer answers there", peer_id=found.peer_id)

    async def on_met(self) -> None:
        self.num_met += 1


def test_reachable_local_peer_is_connected_once() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        node, world = host(lan, 1), FakePeerTable(2)
        tasks.create_task(node.run())
        tasks.create_task(LocalPeers(node, world, world.reach, world.on_met).run())
        tasks.create_task(host(lan, 2).run())
        await asyncio.sleep(KNOWN_FOR_S * 3)
        assert [peer_id for _, peer_id in world.dialled] == [peer(2)]
        assert world.num_met == 1

    in_lan(case)


def test_liars_make_a_node_dial_only_a_few_addresses_and_hide_nobody() -> None:
    async def case(lan: MemoryLan, tasks: asyncio.TaskGroup) -> None:
        node, world = host(lan, 1), FakePeerTable(2)
        tasks.create_task(node.run())
        tasks.create_task(LocalPeers(node, world, world.reach, world.on_met).run())
        tasks.create_task(host(lan, 2).run())
        await asyncio.sleep(0.1)
        for number in range(100, 140):
            lan.send(answer(SERVICE, peer(number), ["/ip4/192.168.1.9/tcp/1"]), sender="192.168.1.66")
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(RETRY_S * 10)
        assert len(world.dialled) <= RETRY_S * 10 / DIAL_EVERY_S + 1
        assert world.known == {peer(2)}
        assert max(at for at, _ in world.dialled) > start + RETRY_S

    in_lan(case)
