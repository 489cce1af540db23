"""Tests of how real nodes find each other's addresses: peers send theirs to the nodes near them, which pass them on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.free_ports import free_port
from support.network_worlds import eventually, libp2p_node
from swarm.network.libp2p_network import Libp2pNetwork
from swarm_protocol.errors import PeerError, PeerRefused, PeerUnreachable
from swarm_protocol.identity import Identity


async def reaches(network: Libp2pNetwork, peer_id: str) -> bool:
    try:
        await network.call(peer_id, "nonesuch", b"", timeout_s=30)
    except PeerRefused:
        return True
    except PeerError:
        return False
    raise AssertionError("somebody serves nonesuch")


@asynccontextmanager
async def seed_and_two(folder: Path) -> AsyncIterator[tuple[Libp2pNetwork, ...]]:
    async with await libp2p_node(folder / "seed") as seed:
        peers = await seed.addrs()
        async with await libp2p_node(folder / "a", peers=peers) as a, await libp2p_node(folder / "b", peers=peers) as b:
            yield seed, a, b


def test_node_is_found_at_its_new_address_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with seed_and_two(tmp_path) as (seed, a, b):
            assert await reaches(a, b.peer_id)
            await b.close()
            await eventually(lambda: _has_lost(a, b.peer_id))
            async with await libp2p_node(tmp_path / "b", peers=await seed.addrs()) as again:
                assert again.peer_id == b.peer_id

                async def is_found() -> bool:
                    return await reaches(a, again.peer_id)

                await eventually(is_found)

    asyncio.run(main())


@pytest.mark.parametrize("is_ip4_there", [True, False])
def test_node_connects_by_ip4_when_a_peer_has_both_versions_and_ip4_answers(is_ip4_there: bool, tmp_path: Path) -> None:
    """A NAT's port is seen only on IPv4 connections; see `swarm.network.paths.dialler.ip4_first`."""

    async def main() -> None:
        listen = [*(["/ip4/127.0.0.1/tcp/0"] if is_ip4_there else []), "/ip6/::1/tcp/0"]
        async with await libp2p_node(tmp_path / "seed", listen=tuple(listen)) as seed:
            given = sorted(await seed.addrs(), reverse=True)
            if not is_ip4_there:
                given.append(f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{seed.peer_id}")
            async with await libp2p_node(tmp_path / "a", peers=given, listen=tuple(listen)) as a:
                [addr] = (await a._host.connected_peers())[seed.peer_id]
                assert addr.startswith("/ip4/" if is_ip4_there else "/ip6/")

    asyncio.run(main())


def test_nodes_that_share_a_seed_find_each_other_also_after_it_is_gone(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with (
            seed_and_two(tmp_path) as (seed, a, b),
            await libp2p_node(tmp_path / "c", peers=await seed.addrs()) as c,
        ):
            assert await reaches(a, b.peer_id)
            assert await reaches(b, a.peer_id)
            with pytest.raises(PeerUnreachable, match="no address of the peer is known"):
                await a.call(Identity(bytes(32)).peer_id, "nonesuch", b"", timeout_s=30)
            await seed.close()  # no node has connected to c yet
            for one, other in itertools.permutations((a, b, c), 2):
                assert await reaches(one, other.peer_id)

    asyncio.run(main())


def test_peer_is_known_by_the_address_that_it_announces(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        addrs = {"listen": (f"/ip4/127.0.0.1/tcp/{port}",), "announce": (f"/dns4/localhost/tcp/{port}",)}
        async with (
            await libp2p_node(tmp_path / "seed") as seed,
            await libp2p_node(tmp_path / "a", peers=await seed.addrs(), **addrs) as a,
        ):
            (contact,) = seed._dht.contacts()
            assert (contact.peer_id, contact.addrs) == (a.peer_id, addrs["announce"])
            assert seed.known_peers == (), "peers' names must be neither dialled nor remembered"
            assert [peer.peer_id for peer in a.known_peers] == [seed.peer_id]

    asyncio.run(main())


async def _has_lost(network: Libp2pNetwork, peer_id: str) -> bool:
    return peer_id not in await network._host.connected_peers()
