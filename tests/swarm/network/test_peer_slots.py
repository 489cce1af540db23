"""Streams and calls are bounded for each peer and in all, and a flood does not keep modest peers out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from support.network_worlds import libp2p_node
from swarm.network.interface import Stream
from swarm.network.libp2p import stream_server, unary_connection
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.peer_budgets import NUM_GUARANTEED, PeerSlots
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused


def test_slots_are_bounded_for_each_peer_and_in_all() -> None:
    slots = PeerSlots[str](per_peer=lambda: 8, in_all=20)
    for peer in ("a", "b", "c", "d"):
        while slots.has_room(peer):
            slots.take(peer)
    assert [slots.held_by(peer) for peer in ("a", "b", "c", "d")] == [8, 8, NUM_GUARANTEED, NUM_GUARANTEED]
    assert slots.num_held == 20 + NUM_GUARANTEED
    for _ in range(NUM_GUARANTEED):
        slots.give_back("d")
    assert not slots.has_room("a")
    assert slots.has_room("d"), "a peer that holds little must be let in"
    with slots.taken("a") as has_room:
        assert not has_room
    assert slots.held_by("a") == 8


def three(case: Callable[[list[Libp2pNetwork]], Awaitable[None]], folder: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(await libp2p_node(folder / "0"))]
            for name in ("1", "2"):
                node = await libp2p_node(folder / name, peers=await nodes[0].addrs())
                nodes.append(await stack.enter_async_context(node))
            await case(nodes)

    uvloop.run(main())


def test_streams_beyond_the_bound_of_a_peer_or_of_all_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "MAX_STREAMS_PER_PEER", 8)
    monkeypatch.setattr(stream_server, "MAX_STREAMS", 8)

    async def case(nodes: list[Libp2pNetwork]) -> None:
        server, flood, other = nodes

        async def hold(_peer_id: str, stream: Stream) -> None:
            await stream.send(b"here")
            await stream.receive()

        await server.serve_stream("hold", hold)
        async with AsyncExitStack() as held:

            async def open_one(node: Libp2pNetwork) -> bytes:
                stream = await held.enter_async_context(node.stream(server.peer_id, "hold", timeout_s=30))
                return await stream.receive()

            for _ in range(8):
                assert await open_one(flood) == b"here"
            with pytest.raises(PeerRefused, match="too many streams"):
                await open_one(flood)
            for _ in range(NUM_GUARANTEED):
                assert await open_one(other) == b"here"
            with pytest.raises(PeerRefused, match="too many streams"):
                await open_one(other)

    three(case, tmp_path)


def test_calls_beyond_the_bound_of_all_are_refused_and_others_get_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CALLS_PER_PEER", 12)
    monkeypatch.setattr(unary_connection, "MAX_CALLS", 8)

    async def case(nodes: list[Libp2pNetwork]) -> None:
        server, flood, other = nodes
        release, num_held = asyncio.Event(), 0

        async def hold(_peer_id: str, request: bytes) -> bytes:
            nonlocal num_held
            num_held += 1
            await release.wait()
            return request

        async def echo(_peer_id: str, request: bytes) -> bytes:
            return request

        await server.serve("hold", hold)
        await server.serve("echo", echo)
        calls = [asyncio.create_task(flood.call(server.peer_id, "hold", b"", timeout_s=60)) for _ in range(8)]
        async with asyncio.timeout(30):
            while num_held < 8:
                await asyncio.sleep(0.01)
        with pytest.raises(PeerRefused, match="works on"):
            await flood.call(server.peer_id, "echo", b"", timeout_s=30)
        assert await other.call(server.peer_id, "echo", b"x", timeout_s=30) == b"x"
        release.set()
        assert await asyncio.gather(*calls) == [b""] * 8

    three(case, tmp_path)
