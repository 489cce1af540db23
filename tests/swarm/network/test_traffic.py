"""Bytes are counted by the kind of path to the peer, also between real hosts of which one is behind a relay."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest
import uvloop
from support.network_worlds import eventually, libp2p_node
from swarm.network import traffic
from swarm.network.interface import Stream
from swarm.network.libp2p.host import Host
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.traffic import PeerPath, Traffic

RELAYED = ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWrelay/p2p-circuit",)
DIRECT = ("/ip4/127.0.0.1/tcp/1",)


def test_bytes_count_for_the_last_observed_path_and_for_the_peer() -> None:
    counted = Traffic()
    counted.sent("far", 1)
    counted.note({"far": "relayed", "near": "direct", "back": "dialled back", "idle": "punched"})
    counted.sent("far", 10)
    counted.sent("back", 100)
    counted.received("far", 5)
    assert counted.num_connected == {"direct": 1, "dialled back": 1, "punched": 1, "relayed": 1}
    assert counted.sent_bytes == {"direct": 1, "dialled back": 100, "punched": 0, "relayed": 10}
    assert counted.received_bytes == {"direct": 0, "dialled back": 0, "punched": 0, "relayed": 5}
    assert counted.peer_paths() == {
        "far": PeerPath(kind="relayed", sent_bytes=11, received_bytes=5),
        "near": PeerPath(kind="direct", sent_bytes=0, received_bytes=0),
        "back": PeerPath(kind="dialled back", sent_bytes=100, received_bytes=0),
        "idle": PeerPath(kind="punched", sent_bytes=0, received_bytes=0),
    }


def test_bytes_of_a_peer_are_kept_while_it_is_not_connected() -> None:
    counted = Traffic()
    counted.note({"far": "relayed"})
    counted.received("far", 5)
    counted.note({})
    assert counted.peer_paths() == {}
    counted.note({"far": "punched"})
    counted.received("far", 7)
    assert counted.received_bytes == {"direct": 0, "dialled back": 0, "punched": 7, "relayed": 5}
    assert counted.peer_paths() == {"far": PeerPath(kind="punched", sent_bytes=0, received_bytes=12)}


def test_longest_silent_peers_are_dropped_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_PEERS", 2)
    counted = Traffic()
    for peer_id in ("first", "second", "first", "third"):
        counted.sent(peer_id, 1)
    counted.note(dict.fromkeys(("first", "second", "third"), "direct"))
    assert {peer_id: path.sent_bytes for peer_id, path in counted.peer_paths().items()} == {
        "first": 2, "second": 0, "third": 1,
    }  # fmt: skip


def test_path_is_relayed_only_while_all_connections_are_relayed() -> None:
    control = MagicMock()
    host = Host(MagicMock(), control, MagicMock(), "me")
    places = {"far": RELAYED, "near": DIRECT, "both": (*RELAYED, *DIRECT), "leaving": (), "fallen": RELAYED}
    control.connected_peers = AsyncMock(return_value=places)
    host.introduced = {"both": "punched", "near": "dialled back", "fallen": "punched", "gone": "punched"}
    asyncio.run(host.look())
    assert {peer_id: path.kind for peer_id, path in host.traffic.peer_paths().items()} == {
        "far": "relayed", "near": "dialled back", "both": "punched", "leaving": "direct", "fallen": "relayed",
    }  # fmt: skip


def test_calls_and_streams_of_real_hosts_are_counted_on_both_sides(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
            relay = await stack.enter_async_context(await libp2p_node(tmp_path / "relay", relay="serve"))
            peers = await relay.addrs()
            hidden, caller = [
                await stack.enter_async_context(await libp2p_node(tmp_path / name, peers=peers, listen=(), relay=use))
                for name, use in (("hidden", "use"), ("caller", "none"))
            ]
            await _exchange(hidden, caller)
            await _exchange(relay, caller, expects="direct")
            assert relay.dht_counts.num_peers == 1  # the caller cannot be dialled
            assert relay.dht_counts.num_records == relay.dht_counts.num_refused == 0
            assert await caller.publish("key", b"record", lifetime_s=30)
            assert relay.dht_counts.num_records == 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def _exchange(server: Libp2pNetwork, caller: Libp2pNetwork, expects: str = "relayed") -> None:
    async def answer(_peer_id: str, request: bytes) -> bytes:
        return 2 * request

    async def swallow(_peer_id: str, stream: Stream) -> None:
        await stream.receive()
        await stream.send(b"x" * 10_000)

    await server.serve("twice", answer)
    await server.serve_stream("swallow", swallow)
    await caller.call(server.peer_id, "twice", b"", timeout_s=30)  # opens the connection

    async def is_seen() -> bool:
        kinds = [at.traffic.peer_paths().get(to.peer_id) for at, to in ((caller, server), (server, caller))]
        return all(path is not None and path.kind == expects for path in kinds)

    await eventually(is_seen)
    before = [_of(caller), _of(server)]
    await caller.call(server.peer_id, "twice", b"x" * 50_000, timeout_s=30)
    async with caller.stream(server.peer_id, "swallow", timeout_s=30) as stream:
        await stream.send(b"x" * 300_000)
        await stream.receive()
    sent, received = 350_000, 110_000
    for network, peer, way in ((caller, server, (sent, received)), (server, caller, (received, sent))):
        path = network.traffic.peer_paths()[peer.peer_id]
        assert all(moved >= least for moved, least in zip((path.sent_bytes, path.received_bytes), way, strict=True))
    for network, had, wants in zip((caller, server), before, ((sent, received), (received, sent)), strict=True):
        moved = tuple(now - then for now, then in zip(_of(network), had, strict=True))
        # apart from them only the DHT sends, in small messages
        assert all(want <= now < want + 20_000 for now, want in zip(moved, wants, strict=True)), (moved, wants)


def _of(network: Libp2pNetwork) -> tuple[int, int]:
    """Return the sum over all paths, since a relayed connection may become direct between two looks."""
    return sum(network.traffic.sent_bytes.values()), sum(network.traffic.received_bytes.values())
