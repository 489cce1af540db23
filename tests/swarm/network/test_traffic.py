"""Bytes are counted by how the peer is reached, also between real hosts of which one is behind a relay."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import uvloop
from support.network_worlds import eventually, libp2p_node
from swarm.network.interface import Stream
from swarm.network.libp2p.libp2p_network import Libp2pNetwork
from swarm.network.traffic import Traffic

RELAYED = ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWrelay/p2p-circuit",)
DIRECT = ("/ip4/127.0.0.1/tcp/1",)


def test_bytes_count_for_the_class_that_the_peer_had_at_the_last_look() -> None:
    traffic = Traffic()
    traffic.sent("far", 1)
    traffic.note({"far": RELAYED, "near": DIRECT, "both": (*RELAYED, *DIRECT), "leaving": ()})
    traffic.sent("far", 10)
    traffic.sent("both", 100)
    traffic.received("far", 5)
    assert traffic.num_connected == {"direct": 3, "relayed": 1}
    assert traffic.sent_bytes == {"direct": 101, "relayed": 10}
    assert traffic.received_bytes == {"direct": 0, "relayed": 5}
    traffic.note({})
    traffic.received("far", 7)
    assert traffic.received_bytes == {"direct": 7, "relayed": 5}


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
        return all(each.traffic.num_connected[expects] for each in (server, caller))  # type: ignore[index]

    await eventually(is_seen, timeout_s=10)
    before = [_of(caller), _of(server)]
    await caller.call(server.peer_id, "twice", b"x" * 50_000, timeout_s=30)
    async with caller.stream(server.peer_id, "swallow", timeout_s=30) as stream:
        await stream.send(b"x" * 300_000)
        await stream.receive()
    sent, received = 350_000, 110_000
    for network, had, wants in zip((caller, server), before, ((sent, received), (received, sent)), strict=True):
        moved = tuple(now - then for now, then in zip(_of(network), had, strict=True))
        # beside them only the DHT talks, in small messages
        assert all(want <= now < want + 20_000 for now, want in zip(moved, wants, strict=True)), (moved, wants)


def _of(network: Libp2pNetwork) -> tuple[int, int]:
    """Of both classes: between two looks a relayed connection may have become a direct one."""
    return sum(network.traffic.sent_bytes.values()), sum(network.traffic.received_bytes.values())
