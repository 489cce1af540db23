"""Conclusions from a peer's addresses: whether it is gone, and which addresses are tried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import cast

import pytest
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.reconnection import GRACE_S, MAX_PAUSE_S, Reconnector, accepts_connections
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity

PEER = Identity(b"1" * 32).peer_id


def test_peer_is_not_judged_gone_when_its_name_cannot_be_looked_up() -> None:
    name = f"/dns4/{64 * 'a'}.example/tcp/1"
    host = cast(Host, SimpleNamespace(known_addrs=lambda _peer_id: (name,)))
    assert not asyncio.run(Reconnector(host)._refuses(PEER))


def test_address_accepts_connections_while_a_program_listens_there() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        addr = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
        assert await accepts_connections(addr)
        server.close()
        await server.wait_closed()
        assert not await accepts_connections(addr)
        for unknown in (f"{addr}/p2p/{PEER}/p2p-circuit", "/dns4/seed.example/tcp/1"):
            assert await accepts_connections(unknown), "only a dial can tell"

    asyncio.run(main())


class Peer:
    """A peer as another node's host sees it.

    It is reached at `place` from `back_at` on. Until then its relay says that it holds no reservation. A search first
    finds its address before `place`, in another network.
    """

    def __init__(
        self, *, known: Sequence[str], place: str = "", back_at: float = 0.0, before: Sequence[str] = ()
    ) -> None:
        self.peer_id = "0"  # smaller than any peer's id, so that this node dials first
        self.control = self
        self.dialled: list[Sequence[str]] = []
        self.num_searches = 0
        self._known = known
        self._place = place
        self._back_at = back_at
        self._before = before

    def known_addrs(self, _peer_id: str) -> Sequence[str]:
        return self._known

    async def connected_peers(self) -> dict[str, tuple[str, ...]]:
        return {}

    async def disconnect(self, _peer_id: str) -> None:
        pass

    async def connect(self, _peer_id: str, addrs: Sequence[str] = ()) -> None:
        self.dialled.append(addrs)
        if self._place not in addrs:
            raise ControlError("failed to dial: no addresses")
        if asyncio.get_running_loop().time() < self._back_at:
            raise ControlError("error opening relay circuit: NO_RESERVATION (204)")

    async def find_addrs(self, _peer_id: str) -> AsyncGenerator[Sequence[str], None]:
        self.num_searches += 1
        if self._before:
            yield self._before
        yield (self._place,)


class Unreachable(Peer):
    """A peer whose announced address is a stranger's, whose machine accepts connections."""

    async def connect(self, _peer_id: str, addrs: Sequence[str] = ()) -> None:
        self.dialled.append(addrs)
        raise ControlError("i/o timeout")


CIRCUIT = f"/ip4/44.1.1.1/tcp/4001/p2p/{PEER}/p2p-circuit"


def test_peer_without_known_addresses_is_searched_for_after_this_node_gave_the_path_up() -> None:
    async def main() -> None:
        peer = Peer(known=(), place=CIRCUIT)
        reconnector = Reconnector(cast(Host, peer))
        await reconnector.drop(PEER)
        await reconnector.reach(PEER)
        assert peer.num_searches == 1

    virtual_time.run(main())


def test_peer_whose_relay_is_gone_is_searched_for_at_other_nodes() -> None:
    async def main() -> None:
        gone = CIRCUIT.replace("44.1.1.1", "44.2.2.2")
        peer = Peer(known=(gone,), place=CIRCUIT, before=(gone, "/ip4/192.168.4.2/tcp/4001"))
        await asyncio.wait_for(Reconnector(cast(Host, peer)).reach(PEER), GRACE_S)
        assert peer.dialled[-1] == (CIRCUIT,)
        assert peer.num_searches == 1

    virtual_time.run(main())


@pytest.mark.parametrize("back_s", [0.0, 0.3, GRACE_S])
def test_relay_without_a_reservation_for_a_peer_is_tried_again_while_a_stream_waits(back_s: float) -> None:
    async def main() -> None:
        now = asyncio.get_running_loop().time
        peer = Peer(known=(CIRCUIT,), place=CIRCUIT, back_at=now() + back_s)
        reconnector = Reconnector(cast(Host, peer))
        if back_s:
            with pytest.raises(PeerUnreachable, match="has no reservation at its relay"):
                await reconnector.reach(PEER)
        began_at = now()
        await reconnector.reach_patiently(PEER)
        assert back_s <= now() - began_at <= back_s + MAX_PAUSE_S

    virtual_time.run(main())


@pytest.mark.parametrize("own_id", ["0", "z"])
def test_streams_of_one_peer_share_its_dials_and_knocks(own_id: str) -> None:
    async def main() -> None:
        num_knocks = 0

        async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_knocks
            num_knocks += 1
            writer.close()

        async with AsyncExitStack() as stack:
            servers = [await asyncio.start_server(accept, "127.0.0.1", 0) for _ in range(limits.MAX_CONTACT_ADDRS - 1)]
            for server in servers:
                await stack.enter_async_context(server)
            known = [f"/ip4/127.0.0.1/tcp/{each.sockets[0].getsockname()[1]}" for each in servers]
            peer = Unreachable(known=("/ip4/127.0.0.1/tcp/1", *known))
            peer.peer_id = own_id
            reconnector = Reconnector(cast(Host, peer))
            streams = [asyncio.create_task(reconnector.reach(PEER)) for _ in range(32)]
            await asyncio.wait(streams, timeout=1.0)
            assert 0 < len(peer.dialled) < 20
            assert 0 < num_knocks < 40
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)

    asyncio.run(main())


def test_streams_of_one_peer_learn_at_once_that_it_is_gone() -> None:
    async def main() -> None:
        peer = Peer(known=("/ip4/127.0.0.1/tcp/1",))
        reconnector = Reconnector(cast(Host, peer))
        found = await asyncio.gather(*(reconnector.reach(PEER) for _ in range(8)), return_exceptions=True)
        assert all(isinstance(each, PeerUnreachable) for each in found)
        assert len(peer.dialled) == 1
        with pytest.raises(PeerUnreachable):
            await reconnector.reach(PEER)
        assert len(peer.dialled) == 2, "a later stream does not trust the finding of an earlier one"

    asyncio.run(main())


def test_peer_whose_machine_refuses_connections_is_not_waited_for() -> None:
    async def main() -> None:
        peer = Peer(known=("/ip4/127.0.0.1/tcp/1",))
        reconnector = Reconnector(cast(Host, peer))
        with pytest.raises(PeerUnreachable, match="is gone"):
            await reconnector.reach_patiently(PEER)

    asyncio.run(main())
