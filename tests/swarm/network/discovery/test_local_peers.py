"""Real hosts whose local network is in memory: local peers prove their identity, and liars do no harm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.memory_lan import MemoryLan, subnets
from support.network_worlds import eventually, libp2p_node
from swarm.network import libp2p_network
from swarm.network.discovery import local_discovery
from swarm.network.discovery.local_discovery import LocalDiscovery
from swarm.network.discovery.mdns_messages import answer, service_of
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.network_entry import NetworkEntry
from swarm_protocol.errors import StartError
from swarm_protocol.identity import Identity

LIAR = Identity(bytes(32)).peer_id


@pytest.fixture
def lan(monkeypatch: pytest.MonkeyPatch) -> MemoryLan:
    """All nodes of the test are in this network, where their loopback addresses count."""
    lan = MemoryLan()
    here = subnets("192.168.1.5/24")

    def discovery(
        options: Libp2pOptions, peer_id: str, own_addrs: Callable[[], Sequence[str]], tasks: asyncio.TaskGroup
    ) -> LocalDiscovery:
        found = LocalDiscovery(
            options.network_id,
            peer_id,
            lambda _: own_addrs(),
            subnets=lambda: here,
            open_link=lan.open,
        )
        tasks.create_task(found.run())
        return found

    monkeypatch.setattr(libp2p_network, "start_discovery", discovery)
    monkeypatch.setattr("swarm.network.discovery.mdns_messages.is_near", lambda _addr, _subnets: True)
    monkeypatch.setattr("swarm.network.discovery.local_discovery.is_near", lambda _addr, _subnets: True)
    monkeypatch.setattr(libp2p_network, "NEARBY_S", 1.0)
    monkeypatch.setattr(local_discovery, "DIAL_EVERY_S", 0.05)
    return lan


def test_node_that_knows_nobody_joins_through_a_local_peer(tmp_path: Path, lan: MemoryLan) -> None:
    async def main() -> None:
        async with (
            await libp2p_node(tmp_path / "a", may_be_first=True) as a,
            await libp2p_node(tmp_path / "b") as b,
        ):
            assert b.entry == NetworkEntry(nearby=(a.peer_id,))
            assert await b.publish("k", b"", lifetime_s=10)
            dead = f"/ip4/127.0.0.1/tcp/1/p2p/{LIAR}"
            async with await libp2p_node(tmp_path / "c", peers=(dead,)) as c:
                assert set(c.entry.nearby) & {a.peer_id, b.peer_id}

    asyncio.run(main())


def test_node_alone_in_its_local_network_says_so(tmp_path: Path, lan: MemoryLan) -> None:
    async def main() -> None:
        async with await libp2p_node(tmp_path / "a", network_id="other", may_be_first=True):
            with pytest.raises(StartError, match=r"^no node of this network answered in the local network"):
                await libp2p_node(tmp_path / "b")

    asyncio.run(main())


def test_lying_local_peers_are_not_connected_and_hide_nobody(
    tmp_path: Path, lan: MemoryLan, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with (
            await libp2p_node(tmp_path / "stranger", network_id="other", may_be_first=True) as stranger,
            await libp2p_node(tmp_path / "a", may_be_first=True) as a,
            await libp2p_node(tmp_path / "b", may_be_first=True) as b,
        ):
            [stranger_addr] = [addr.partition("/p2p/")[0] for addr in await stranger.addrs()]
            service = service_of("test")
            # a made-up peer at another's address, a peer of another network, and an address where nobody listens
            for peer_id, addr in (
                (LIAR, stranger_addr),
                (stranger.peer_id, stranger_addr),
                (Identity(b"1" * 32).peer_id, "/ip4/127.0.0.1/tcp/1"),
            ):
                lan.send(answer(service, peer_id, [addr]), sender="192.168.1.66")

            async def have_met() -> bool:
                return a.peer_id in b._dht.peers() and b.peer_id in a._dht.peers()

            async def have_dialled_all() -> bool:
                return caplog.text.count("cannot reach a node of the local network") >= 6

            await eventually(have_met)
            await eventually(have_dialled_all)
            assert set(a._dht.peers()) == {b.peer_id}
            assert "another peer answers there" in caplog.text

    asyncio.run(main())
