"""A node that nobody can connect to is reached through its relay."""

from __future__ import annotations

import asyncio
from pathlib import Path

from network_worlds import eventually, libp2p_node
from swarm.network.interface import Stream
from swarm.network.libp2p_daemon import DaemonOptions
from swarm.network.libp2p_host import Host
from swarm_protocol.errors import PeerUnreachable


async def echo(_peer_id: str, request: bytes) -> bytes:
    return request


async def echo_stream(_peer_id: str, stream: Stream) -> None:
    await stream.send(await stream.receive())


async def check_circuit(peer_id: str, addrs: tuple[str, ...]) -> None:
    """Whom `peer_id` never heard of can dial its address, which leads through the relay."""
    stranger = await Host.start(DaemonOptions(dht_server=False))
    await stranger.control.connect(peer_id, [addr.removesuffix(f"/p2p/{peer_id}") for addr in addrs])
    (addr,) = (await stranger.control.connected_peers())[peer_id]
    assert "/p2p-circuit" in addr
    await stranger.stop()


def test_node_behind_nat_is_reached_through_its_seed(tmp_path: Path) -> None:
    async def main() -> None:
        seed = await libp2p_node(tmp_path / "seed", relay="serve")
        peers = await seed.addrs()
        hidden = await libp2p_node(tmp_path / "hidden", peers=peers, listen=(), relay="use")
        await hidden.serve("echo", echo)
        await hidden.serve_stream("echo", echo_stream)
        assert await hidden.addrs() == (f"{peers[0]}/p2p-circuit/p2p/{hidden.peer_id}",)

        other = await libp2p_node(tmp_path / "other", peers=peers)

        async def answers() -> bool:
            try:
                return await other.call(hidden.peer_id, "echo", b"hello", timeout_s=5) == b"hello"
            except PeerUnreachable:
                return False  # its reservation at the relay is still under way

        await eventually(answers)
        async with other.stream(hidden.peer_id, "echo", timeout_s=5) as stream:
            await stream.send(b"streamed")
            assert await stream.receive() == b"streamed"

        await check_circuit(hidden.peer_id, await hidden.addrs())
        await seed.close()

        async def tells_no_address() -> bool:
            return await hidden.addrs() == ()

        await eventually(tells_no_address)
        await other.close()
        await hidden.close()

    asyncio.run(main())
