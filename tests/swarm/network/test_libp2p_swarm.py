"""Many real hosts find each other, drop dead ones, and recover from a partition."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from support.free_ports import free_port
from support.network_worlds import eventually, libp2p_node
from swarm.network import network_entry, partition_watch
from swarm.network.discovery.dns_lookup import DnsLookup, LookupFailed
from swarm.network.libp2p.greeting import Greeting
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.reconnection import accepts_connections
from swarm.network.libp2p_network import (
    Libp2pNetwork,
)
from swarm.network.network_entry import NobodyReached
from swarm_protocol.errors import PeerRefused
from swarm_protocol.identity import Identity
from swarm_protocol.records import child_keys, lookup_key

LIFETIME_S = 4.0
STRANGERS = [Identity(bytes([number]) * 32).peer_id for number in (1, 2)]
KEYS = child_keys(lookup_key("nodes"))


async def keep_announcing(network: Libp2pNetwork, lifetime_s: float) -> None:
    index = int.from_bytes(network.peer_id.encode()[-2:], "big")
    while True:
        await network.publish(KEYS[index % len(KEYS)], network.peer_id.encode(), lifetime_s=lifetime_s)
        await asyncio.sleep(lifetime_s / 2)


async def wait_until_all_see(networks: list[Libp2pNetwork], expected: set[str], timeout_s: float) -> None:
    """Wait until each of `networks` has found exactly `expected`."""
    few_at_once = asyncio.Semaphore(3)  # all hosts share one process here, and would time each other out

    async def see(network: Libp2pNetwork) -> None:
        seen: set[str] = set()
        try:
            async with asyncio.timeout(timeout_s):
                while seen != expected:
                    async with few_at_once:
                        seen = {envelope.peer_id for envelope in await network.lookup(KEYS, timeout_s=timeout_s)}
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"missing {expected - seen}, too many {seen - expected}") from None

    await asyncio.gather(*(see(network) for network in networks))


def seed_of(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the listen address of a seed that returns to the same port, and the address that its peers are given."""
    listen = f"/ip4/127.0.0.1/tcp/{free_port()}"
    return (listen,), (f"{listen}/p2p/{Identity.load_or_create(folder / 'seed').peer_id}",)


async def group_of(folder: Path, names: str, peers: tuple[str, ...]) -> list[Libp2pNetwork]:
    """Start a node for each letter, which has published a record."""
    nodes = [await libp2p_node(folder / name, peers=peers) for name in names]
    for node in nodes:
        await node.publish(KEYS[0], b"", lifetime_s=120)
    return nodes


async def close_all(networks: list[Libp2pNetwork]) -> None:
    await asyncio.gather(*(network.close() for network in networks))


def test_eight_hosts_find_each_other_and_drop_killed_ones_within_their_records_lifetime(tmp_path: Path) -> None:
    async def main() -> None:
        seed = await libp2p_node(tmp_path / "seed")
        peers, hosts = await seed.addrs(), [seed]
        for batch in range(0, 7, 4):
            starts = (libp2p_node(tmp_path / f"n{index}", peers=peers) for index in range(batch, min(batch + 4, 7)))
            hosts += await asyncio.gather(*starts)
        announcing = {host: asyncio.create_task(keep_announcing(host, LIFETIME_S)) for host in hosts}
        await wait_until_all_see(hosts, {host.peer_id for host in hosts}, 100)

        killed, survivors = hosts[1::2], hosts[0::2]
        for host in killed:
            announcing[host].cancel()
            os.kill(host._host.daemon.pid, signal.SIGKILL)
        await asyncio.sleep(LIFETIME_S)
        found = await survivors[0].lookup(KEYS, timeout_s=100)
        assert not {envelope.peer_id for envelope in found} & {host.peer_id for host in killed}
        await wait_until_all_see(survivors, {host.peer_id for host in survivors}, 100)

        for task in announcing.values():
            task.cancel()
        await asyncio.wait(announcing.values())
        await close_all(hosts)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_two_groups_find_each_other_when_their_seed_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_watch, "CHECK_S", 0.3)
    monkeypatch.setattr(partition_watch, "MAX_PAUSE_S", 0.6)
    listen, peers = seed_of(tmp_path)

    async def main() -> None:
        seed = await libp2p_node(tmp_path / "seed", listen=listen)
        first = await group_of(tmp_path, "ab", peers)
        os.kill(seed._host.daemon.pid, signal.SIGKILL)
        await seed.wait_failed()
        await seed.close()
        await wait_until_all_see(first, {node.peer_id for node in first}, 40)  # they go on without it

        seed = await libp2p_node(tmp_path / "seed", listen=listen)  # it knows nobody any more
        second = await group_of(tmp_path, "cd", peers)
        everyone = [*first, *second, seed]
        await wait_until_all_see(everyone, {node.peer_id for node in [*first, *second]}, 40)
        await close_all(everyone)

    asyncio.run(main())


@pytest.mark.parametrize("is_reachable", [True, False])
def test_node_that_waits_for_its_peer_can_be_joined_through_by_that_peer(tmp_path: Path, is_reachable: bool) -> None:
    """Once that peer has joined, the waiting node joins, too, even if it cannot dial the peer."""
    places = {name: f"/ip4/127.0.0.1/tcp/{free_port()}" for name in "ab"}
    addrs = {name: f"{place}/p2p/{Identity.load_or_create(tmp_path / name).peer_id}" for name, place in places.items()}

    async def main() -> None:
        starting = asyncio.create_task(
            libp2p_node(tmp_path / "a", listen=(places["a"],), peers=(addrs["b"],), patience_s=60.0)
        )
        with pytest.raises(NobodyReached):
            await libp2p_node(tmp_path / "c", peers=(addrs["b"],))
        await eventually(partial(accepts_connections, places["a"]))
        listen = (places["b"],) if is_reachable else ()
        async with await libp2p_node(tmp_path / "b", listen=listen, peers=(addrs["a"],)) as b:
            assert b.entry.given == (Identity.load(tmp_path / "a").peer_id,)
            async with asyncio.timeout(30):
                a = await starting
            async with a:
                assert a.entry.given == (b.peer_id,)

    asyncio.run(main())


@pytest.mark.parametrize(
    "peer", ["nonesuch.swarm.invalid", f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGERS[0]}/p2p-circuit/p2p/{STRANGERS[1]}"]
)
def test_node_that_waits_for_a_name_or_for_a_relayed_peer_can_be_joined_through(
    tmp_path: Path, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(_lookup: DnsLookup, _name: str) -> list[str]:
        raise LookupFailed("there is no such name")

    monkeypatch.setattr(DnsLookup, "texts", none)
    place = f"/ip4/127.0.0.1/tcp/{free_port()}"
    addr = f"{place}/p2p/{Identity.load_or_create(tmp_path / 'a').peer_id}"

    async def main() -> None:
        starting = asyncio.create_task(libp2p_node(tmp_path / "a", listen=(place,), peers=(peer,), patience_s=60.0))
        await eventually(partial(accepts_connections, place))
        for name in "bc":  # the second one comes once the first dials of an impatient node have failed
            async with await libp2p_node(tmp_path / name, peers=(addr,)) as joined:
                assert joined.entry.given == (Identity.load(tmp_path / "a").peer_id,)
        assert not starting.done()
        starting.cancel()
        await asyncio.wait((starting,))

    asyncio.run(main())


def test_group_asks_again_when_it_reached_its_seed_before_that_served_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_watch, "CHECK_S", 0.1)
    monkeypatch.setattr(partition_watch, "MIN_PAUSE_S", 0.1)
    monkeypatch.setattr(partition_watch, "MAX_PAUSE_S", 0.1)
    listen, peers = seed_of(tmp_path)
    is_back = asyncio.Event()
    missing_it: set[str] = set()
    too_early: set[str] = set()
    asked_again: set[str] = set()

    really_connect = network_entry.connect

    async def connect(host: Host, peer_id: str, addrs: Sequence[str], network_id: str) -> Greeting:
        missing_it.add(host.peer_id)
        await is_back.wait()  # the daemon would not repeat a failed dial for 5 s
        greeting = await really_connect(host, peer_id, addrs, network_id)
        if host.peer_id in too_early:
            too_early.remove(host.peer_id)
            raise PeerRefused("it is a libp2p host, but not a Swarm node")
        asked_again.add(host.peer_id)
        return greeting

    async def main() -> None:
        seed = await libp2p_node(tmp_path / "seed", listen=listen)
        group = await group_of(tmp_path, "ab", peers)
        await wait_until_all_see(group, {node.peer_id for node in group}, 40)
        too_early.update(node.peer_id for node in group)
        monkeypatch.setattr(partition_watch, "connect", connect)
        monkeypatch.setattr(partition_watch, "accepts_connections", AsyncMock(return_value=True))
        await seed.close()

        async def all_miss_it() -> bool:
            return missing_it == too_early

        # a member to which the seed is connected again before its next check would not ask
        await eventually(all_miss_it)
        seed = await libp2p_node(tmp_path / "seed", listen=listen)
        is_back.set()
        members = [*group, *await group_of(tmp_path, "c", peers)]
        await wait_until_all_see([seed, *members], {node.peer_id for node in members}, 40)

        async def all_asked_again() -> bool:
            return missing_it <= asked_again

        await eventually(all_asked_again)
        await close_all([seed, *members])

    asyncio.run(main())


def test_seed_is_asked_again_when_it_has_dropped_nodes_that_are_still_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_watch, "CHECK_S", 0.1)
    monkeypatch.setattr(partition_watch, "REFRESH_S", 0.3)

    async def main() -> None:
        seed = await libp2p_node(tmp_path / "seed")
        nodes = [await libp2p_node(tmp_path / name, peers=await seed.addrs()) for name in ("a", "b", "c")]

        async def all_know_all() -> bool:
            return all(len(node._dht.peers()) == 3 for node in (seed, *nodes))

        await eventually(all_know_all)
        for one in (seed, nodes[0]):
            for other in nodes[1:]:
                one._dht.known.table.lost(other.peer_id)
                other._dht.known.table.lost(one.peer_id)
        assert not await all_know_all()
        await eventually(all_know_all)
        await close_all([seed, *nodes])

    asyncio.run(main())


def test_node_that_lost_all_peers_rejoins_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_watch, "CHECK_S", 0.3)
    monkeypatch.setattr(partition_watch, "MAX_PAUSE_S", 0.6)

    async def main() -> None:
        listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)
        seed = await libp2p_node(tmp_path / "seed", listen=listen)
        node = await libp2p_node(tmp_path / "a", peers=await seed.addrs())
        await node.publish(KEYS[0], b"", lifetime_s=120)
        await seed.close()

        async def is_alone() -> bool:
            return not await node._host.control.connected_peers()

        await eventually(is_alone)
        seed = await libp2p_node(tmp_path / "seed", listen=listen)
        await wait_until_all_see([seed], {node.peer_id}, 40)  # its earlier record is published again
        await close_all([seed, node])

    asyncio.run(main())
