"""All seeds of a network die for an hour: the real joining, DHT, membership and memory of peers, in virtual time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from unittest.mock import AsyncMock

import pytest
from swarm.network import partition_watch
from swarm.network.discovery.peer_names import GivenPeers
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.greeting import HELLO, hello_answer
from swarm.network.libp2p.host import Host
from swarm.network.membership import Membership
from swarm.network.network_entry import NetworkEntry, join
from swarm.network.partition_watch import PartitionWatch
from swarm.network.rate import Rate
from swarm.simulation.scenario import Nat, Scenario
from swarm.simulation.simulated_host import HostWorld, Links, Place, SimulatedHost
from swarm.simulation.simulated_network import NETWORK_ID, SharedRecords, SimulatedNetwork
from swarm.testing import virtual_time
from swarm_node.storage import remembered_peers
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord

NUM_SEEDS, NUM_MEMBERS, NUM_RESTARTED, NUM_NEWCOMERS = 2, 8, 3, 2
HOUR_S = 3600.0


class DialledHost:
    """The part of a libp2p host that joining and the watch use, over a simulated one."""

    def __init__(self, host: SimulatedHost, network: SimulatedNetwork) -> None:
        self.peer_id = host.peer_id
        self.control = self
        self.gate = None
        self._host = host
        self._network = network

    async def connect(self, peer_id: str, _addrs: Sequence[str]) -> None:
        try:
            await self._host.call(peer_id, HELLO, b"")
        except PeerUnreachable:
            raise ControlError("all dials failed: connection refused") from None

    async def call(self, peer_id: str, protocol: str, request: bytes, **_more: object) -> bytes:
        return await self._host.call(peer_id, protocol, request)

    async def look(self) -> dict[str, tuple[str, ...]]:
        return {peer_id: () for peer_id in self._network.dht.peers() if self._host.sees(peer_id)}


class Node:
    """One node, with the home from which it restarts."""

    def __init__(self, town: Town, number: int) -> None:
        self.seed = hashlib.sha256(str(number).encode()).digest()
        self.peer_id = Identity(self.seed).peer_id
        self.addr = f"/ip4/203.0.113.{number}/tcp/4001"
        self.home = town.folder / f"{number}.json"
        self.is_up = False
        self._town = town

    def __str__(self) -> str:
        return f"{self.addr}/p2p/{self.peer_id}"

    async def start(self, given: Sequence[Node], *, may_be_first: bool = False) -> NetworkEntry:
        town = self._town
        place = Place(region=0, nat=Nat())
        self.host = SimulatedHost(town.hosts, self.peer_id, place, up=Rate(1e7), down=Rate(1e7))
        await self.host.serve(HELLO, hello_answer(NETWORK_ID))
        self.network = await SimulatedNetwork.join(self.seed, self.host, town.records, addr=self.addr, entries=())
        dialled = cast(Host, DialledHost(self.host, self.network))
        peers = GivenPeers([str(each) for each in given], own_peer_id=self.peer_id, listen=())
        await peers.look_up()
        known = [each.contact for each in remembered_peers.read(self.home, NETWORK_ID, self.network.now())]
        remembered = [contact for contact in known if contact.peer_id != self.peer_id]
        entry = await join(dialled, peers, remembered, NETWORK_ID, may_be_first=may_be_first)
        await asyncio.gather(*(self.network.dht.ping(peer_id) for peer_id in entry.peer_ids))
        await self.network.dht.refresh()
        met = {"met": entry.peer_ids, "known": remembered}
        watch = PartitionWatch(dialled, self.network.dht, peers, NETWORK_ID, self._publish_again, **met)
        self._task = asyncio.create_task(self._live(watch))
        self.is_up = True
        return entry

    async def _publish_again(self) -> None:
        self.network.dht.forget_holders()

    async def _live(self, watch: PartitionWatch) -> None:
        async with Membership(self.network) as self.membership, asyncio.TaskGroup() as tasks:
            self.membership.announce(record(self))
            tasks.create_task(watch.run())
            tasks.create_task(self._remember())

    async def _remember(self) -> None:
        while True:
            await asyncio.sleep(remembered_peers.SAVE_S)
            now = self.network.now()
            present = {contact.peer_id: contact.addrs for contact in self.network.dht.contacts()}
            known = remembered_peers.read(self.home, NETWORK_ID, now)
            remembered_peers.write(self.home, NETWORK_ID, remembered_peers.select_peers(known, present, (), now))

    async def crash(self) -> None:
        self.is_up = False
        self.host.stop(goodbye=False)
        self._task.cancel()
        await asyncio.wait((self._task,))

    def raise_failure(self) -> None:
        if self._task.done():
            self._task.result()

    async def sees(self) -> set[str]:
        return {peer_id for peer_id, each in (await self.membership.nodes()).items() if each.state == "alive"}


class Town:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = HostWorld(Links(Scenario()))
        self.records = SharedRecords()
        self._num_nodes = 0

    def nodes(self, count: int) -> list[Node]:
        first, self._num_nodes = self._num_nodes + 1, self._num_nodes + count
        return [Node(self, number) for number in range(first, first + count)]


def record(node: Node) -> NodeRecord:
    return NodeRecord(
        name=node.peer_id[-8:],
        version="test",
        addrs=(str(node),),
        device="cpu",
        memory_bytes=0,
        free_memory_bytes=0,
        reachability="public",
        started_at=node.network.now(),
        role="volunteer",
    )


async def all_see(members: Sequence[Node], there: Sequence[Node]) -> None:
    expected = {node.peer_id for node in there}
    for member in members:
        member.raise_failure()
        assert await member.sees() == expected


async def all_see_until(at_s: float, there: Sequence[Node]) -> None:
    while asyncio.get_running_loop().time() < at_s:
        await asyncio.sleep(150)
        await all_see(there, there)


async def begin(seeds: Sequence[Node], members: Sequence[Node]) -> None:
    await seeds[0].start((), may_be_first=True)
    for node in (*seeds[1:], *members):
        await node.start(seeds[:1] if node in seeds else seeds)
    await asyncio.sleep(300)
    await all_see(members, [*seeds, *members])


async def come_back(nodes: Sequence[Node], seeds: Sequence[Node]) -> None:
    """Start again through remembered peers, since the seeds do not answer."""
    for node in nodes:
        entry = await node.start(seeds)
        assert entry.given == ()
        assert entry.remembered


def test_network_lives_on_for_an_hour_without_its_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a simulated host has no machine, and its dials are the same however many have failed
    monkeypatch.setattr(partition_watch, "accepts_connections", AsyncMock(return_value=True))

    async def main() -> None:
        town = Town(tmp_path)
        seeds, members, newcomers = town.nodes(NUM_SEEDS), town.nodes(NUM_MEMBERS), town.nodes(NUM_NEWCOMERS)
        await begin(seeds, members)
        died_at = asyncio.get_running_loop().time()
        for seed in seeds:
            await seed.crash()
        await asyncio.sleep(150)  # records of the dead are valid for two minutes
        await all_see_until(died_at + HOUR_S / 2, members)

        restarted = members[:NUM_RESTARTED]
        for node in restarted:
            await node.crash()
        await asyncio.sleep(120)
        await come_back(restarted, seeds)
        for newcomer, acquaintance in zip(newcomers, members[NUM_RESTARTED:], strict=False):
            assert (await newcomer.start([acquaintance])).given == (acquaintance.peer_id,)
        await all_see_until(died_at + HOUR_S, [*members, *newcomers])

        # the seeds return with only their keys, and the nodes that know their addresses find them again
        everyone = [*members, *newcomers, *seeds]
        for seed in seeds:
            seed.home.unlink()
            await seed.start((), may_be_first=True)
        await asyncio.sleep(150)
        await all_see(everyone, everyone)
        for node in everyone:
            await node.crash()

    virtual_time.run(main(), watch_tasks=False)
