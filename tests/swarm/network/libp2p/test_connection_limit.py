"""A node with too many connections closes those from the provider's networks that have most of them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from support.network_worlds import eventually, libp2p_node
from swarm.network.libp2p import connection_limit
from swarm.network.libp2p.connection_limit import MAX_PEERS, surplus
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.p2pd_process import DaemonOptions


def network_of(peer_id: str) -> str:
    return peer_id[0]


@pytest.mark.parametrize(
    ("connected", "used", "gone"),
    [
        ("a1 a2 b1", "", ""),
        ("a1 a2 b1 a3 a4", "", "a4"),
        ("a1 a2 b1 a3 a4", "a4", "a3"),
        ("a1 b1 a2 b2 a3 b3 c1", "a3 b1 b2 b3", "a1 a2 b2 b3"),
        ("a1 b1 c1 d1 e1 f1 f2", "", "f2"),
    ],
)
def test_networks_with_most_peers_lose_their_newest_and_those_in_use_last(connected: str, used: str, gone: str) -> None:
    assert sorted(surplus(connected.split(), set(used.split()), network_of, max_peers=4)) == gone.split()


def test_thousands_of_keys_of_one_network_cost_others_nothing() -> None:
    connected = [*(f"b{number}" for number in range(100)), *(f"a{number}" for number in range(10_000))]
    gone = surplus(connected, set(connected[-5000:]), network_of)
    assert len(connected) - len(gone) == MAX_PEERS
    assert set(map(network_of, gone)) == {"a"}


def test_node_closes_connections_of_the_network_that_has_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "CHECK_S", 0.1)
    monkeypatch.setattr(surplus, "__defaults__", (3,))

    async def main() -> None:
        async with await libp2p_node(tmp_path / "seed") as seed, contextlib.AsyncExitStack() as stack:
            (addr,) = await seed.addrs()

            async def connect(listen: tuple[str, ...] = ()) -> str:
                host = await Host.start(DaemonOptions(listen=listen))
                stack.push_async_callback(host.stop)
                await host.control.connect(seed.peer_id, [addr.partition("/p2p/")[0]])
                return host.peer_id

            honest = await connect(("/ip4/127.1.0.1/tcp/0",))
            greedy = [await connect() for _ in range(4)]

            async def is_bounded() -> bool:
                connected = await seed._host.connected_peers()
                return honest in connected and len(connected) == 3 and len(connected.keys() & set(greedy)) == 2

            await eventually(is_bounded)

    asyncio.run(main())
