"""A node with too many connections closes those from the provider's networks that have most of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from support.network_worlds import eventually, libp2p_node
from swarm.network import libp2p_network
from swarm.network.interface import Stream
from swarm.network.libp2p import connection_limit, p2pd_process
from swarm.network.libp2p.connection_limit import CHECK_S, MAX_PEER_CONNECTIONS, MAX_PEERS, ConnectionLimit, surplus
from swarm.network.libp2p.greeting import method_prefix
from swarm.network.libp2p.host import Connections, Host
from swarm.network.libp2p.p2pd_process import DaemonOptions, arguments
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.network_entry import NetworkEntry, join
from swarm.network.peer_budgets import MAX_UNARY_BYTES
from swarm.network.rate import write
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.wire import encode_varint


def network_of(peer_id: str) -> str:
    return peer_id[0]


def connections(peers: Iterable[str], num_each: int = 1) -> Connections:
    return dict.fromkeys(peers, num_each * ("/ip4/127.0.0.1/tcp/1",))


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
    has_to_go = surplus(connections(connected.split()), used.split().__contains__, network_of, max_peers=4)
    assert sorted(has_to_go) == gone.split()


def test_thousands_of_keys_of_one_network_cost_others_nothing() -> None:
    connected = [*(f"b{number}" for number in range(100)), *(f"a{number}" for number in range(10_000))]
    gone = surplus(connections(connected), set(connected[-5000:]).__contains__, network_of)
    assert len(connected) - len(gone) == MAX_PEERS
    assert set(map(network_of, gone)) == {"a"}


def test_few_keys_with_thousands_of_connections_cost_others_nothing() -> None:
    honest = connections(f"a{number}" for number in range(1000)) | connections(("a", "b"), MAX_PEER_CONNECTIONS)
    greedy = connections(("a-greedy", "c"), 5000)
    assert surplus(honest, set().__contains__, network_of) == []
    assert surplus(greedy | honest, greedy.__contains__, network_of) == list(greedy)


def test_libp2p_daemon_closes_no_connection_that_the_node_keeps() -> None:
    flags = dict(flag.split("=", 1) for flag in arguments(DaemonOptions(), "socket", "file") if "=" in flag)
    assert int(flags["-connHi"]) >= MAX_PEERS * MAX_PEER_CONNECTIONS


def test_node_closes_connections_of_the_network_that_has_most_and_those_with_a_call_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_limit, "CHECK_S", 0.1)
    monkeypatch.setattr(surplus, "__defaults__", (3,))

    async def main() -> None:
        async with await libp2p_node(tmp_path / "seed") as seed, contextlib.AsyncExitStack() as stack:
            (addr,) = await seed.addrs()

            calling: set[str] = set()
            monkeypatch.setattr(seed._host, "num_calls", lambda peer_id: int(peer_id in calling))

            async def connect(listen: tuple[str, ...] = (), *, is_calling: bool = False) -> str:
                host = await Host.start(DaemonOptions(listen=listen))
                stack.push_async_callback(host.stop)
                calling.update([host.peer_id] if is_calling else [])
                await host.control.connect(seed.peer_id, [addr.partition("/p2p/")[0]])
                return host.peer_id

            honest = await connect(("/ip4/127.1.0.1/tcp/0",))
            greedy = [await connect() for _ in range(3)]

            async def is_bounded(*kept: str) -> bool:
                connected = (await seed._host.connected_peers()).keys()
                return connected >= {honest, *kept} and len(connected) == 3

            await eventually(is_bounded)
            await asyncio.sleep(
                3 * connection_limit.CHECK_S
            )  # a check with nothing to close, after which it warns no more
            greedy.append(await connect(is_calling=True))
            await eventually(partial(is_bounded, greedy[-1]))

    asyncio.run(main())
    assert caplog.text.count("peers are connected") == 1, "two peers had to go, one after the other"


def test_connections_are_bounded_while_the_node_still_waits_for_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limit, "CHECK_S", 0.1)
    monkeypatch.setattr(surplus, "__defaults__", (2,))
    numbers: list[int] = []

    async def join_among_strangers(host: Host, *args: Any, **options: Any) -> NetworkEntry:
        (addr,) = await host.addrs()

        async def is_bounded() -> bool:
            numbers.append(len(await host.connected_peers()))
            return 0 < numbers[-1] <= 2

        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                stranger = await Host.start(DaemonOptions())
                stack.push_async_callback(stranger.stop)
                await stranger.control.connect(host.peer_id, [addr])
            await eventually(is_bounded, timeout_s=10)
            return await join(host, *args, **options)

    monkeypatch.setattr(libp2p_network, "join", join_among_strangers)

    async def main() -> None:
        async with await libp2p_node(tmp_path / "node"):
            assert numbers[-1] == 2

    asyncio.run(main())


@pytest.mark.parametrize("beyond", ["", "c"], ids=["few peers", "too many peers all the time"])
def test_heavy_daemon_loses_unused_peers_then_all_and_then_has_time_to_give_memory_back(
    monkeypatch: pytest.MonkeyPatch, beyond: str
) -> None:
    limits = iter([100])  # asked for once
    monkeypatch.setattr(connection_limit, "max_memory_bytes", lambda: next(limits))
    monkeypatch.setattr(connection_limit, "surplus", lambda *_: list(beyond))
    weights = iter([100, 101, 101, 101, 101, 101, 50, 101])
    closed: list[list[str]] = []

    async def look() -> Connections:
        closed.append([])
        return connections("ab")

    async def disconnect(peer_id: str) -> None:
        closed[-1].append(peer_id)

    async def main() -> None:
        host: Any = SimpleNamespace(
            look=look,
            provider_of=network_of,
            num_calls=lambda _peer_id: 0,
            daemon=SimpleNamespace(memory_bytes=lambda: next(weights)),
            control=SimpleNamespace(disconnect=disconnect),
        )
        running = asyncio.create_task(ConnectionLimit(host, lambda: {"a"}).run())
        await asyncio.sleep(8.5 * CHECK_S)
        running.cancel()

    virtual_time.run(main())
    expected = ["", "b", "ab", "", "", "b", "", "b"]
    assert ["".join(sorted(each)) for each in closed] == [each + beyond for each in expected]


def test_stranger_that_begins_thousands_of_requests_is_disconnected_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon waits for the end of each request, which takes 18 KiB."""
    num_bytes, num_requests = 80 * 2**20, 4000
    monkeypatch.setattr(connection_limit, "CHECK_S", 1.0)
    monkeypatch.setattr(connection_limit, "max_memory_bytes", lambda: num_bytes)

    async def echo(_peer_id: str, stream: Stream) -> None:
        while True:
            await stream.send(await stream.receive())

    async def begin(stranger: Host, node: Libp2pNetwork, begun: list[asyncio.StreamWriter]) -> None:
        for _ in range(num_requests // 50):
            with contextlib.suppress(PeerUnreachable):  # the node may have closed the connection a moment ago
                _, writer = await stranger.open_stream(node.peer_id, method_prefix(node.network_id) + "dht/find")
                write(writer, encode_varint(MAX_UNARY_BYTES) + b"x")
                begun.append(writer)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            with monkeypatch.context() as patch:
                patch.setattr(p2pd_process, "max_memory_bytes", lambda: num_bytes)
                seed = await stack.enter_async_context(await libp2p_node(tmp_path / "seed"))
            honest = await stack.enter_async_context(await libp2p_node(tmp_path / "honest", peers=await seed.addrs()))
            await seed.serve_stream("echo", echo)
            stream = await stack.enter_async_context(honest.stream(seed.peer_id, "echo", timeout_s=30))
            stranger = await Host.start(DaemonOptions())
            stack.push_async_callback(stranger.stop)
            (addr,) = await seed.addrs()
            await stranger.control.connect(seed.peer_id, [addr.partition("/p2p/")[0]])
            begun: list[asyncio.StreamWriter] = []
            await asyncio.gather(*(begin(stranger, seed, begun) for _ in range(50)))

            async def has_given_memory_back() -> bool:
                return "the libp2p daemon takes" in caplog.text and seed._host.daemon.memory_bytes() < num_bytes

            await eventually(has_given_memory_back)
            await stream.send(b"still here")
            assert await stream.receive() == b"still here"
            for writer in begun:
                writer.transport.abort()

    uvloop.run(main())
