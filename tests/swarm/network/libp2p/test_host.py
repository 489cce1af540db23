"""A host's calls while the libp2p daemon dies or loses a peer, over scripted sockets."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest
from swarm.network.dht.known_peers import KnownPeers
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.daemon_errors import WITHHELD
from swarm.network.libp2p.host import Host
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerUnreachable
from swarm_protocol.identity import Identity

PEER = Identity(bytes(32)).peer_id
FAR = "/ip4/192.0.2.7/tcp/4001"


class Dying:
    """A daemon's control socket and unary connection. It reports that it reached nobody, and dies at a dial."""

    async def call(self, _peer_id: str, _protocol: str, _request: bytes) -> bytes:
        raise ControlError("failed to dial: no addresses")

    async def connect(self, _peer_id: str, _addrs: Sequence[str]) -> None:
        raise ConnectionRefusedError("the socket is gone")


async def _somewhere(_peer_id: str) -> AsyncGenerator[Sequence[str], None]:
    yield (FAR,)


def test_call_raises_unreachable_when_its_dial_finds_the_daemon_gone() -> None:
    async def main() -> None:
        host = Host(cast("Any", None), cast("Any", Dying()), cast("Any", Dying()), PEER)
        host.find_addrs = _somewhere
        with pytest.raises(PeerUnreachable):
            await host.call(PEER, "method", b"")

    asyncio.run(main())


def test_call_whose_dial_this_node_withholds_is_no_failure_of_the_peer() -> None:
    """The DHT would otherwise leave the peer out for up to MAX_SUSPECT_S, though nobody has dialled it."""

    async def withhold(_peer_id: str, _addrs: Sequence[str]) -> None:
        raise ControlError(WITHHELD)

    async def main() -> None:
        host = Host(cast("Any", None), cast("Any", Dying()), cast("Any", Dying()), "me")
        host.connect = withhold
        host.find_addrs = _somewhere
        with pytest.raises(PeerRefused, match=WITHHELD):
            await host.call(PEER, "method", b"")
        known = KnownPeers(host, "")
        known.table.heard_of(PEER)
        assert await known.find(PEER, 0, b"", [FAR]) is None
        assert PEER in known.table
        assert not known.suspects.at(asyncio.get_running_loop().time())

    asyncio.run(main())


def test_call_to_a_silent_peer_ends_at_its_deadline() -> None:
    async def main() -> None:
        async def silent(*_: object) -> None:
            await asyncio.sleep(60)

        host = Host(MagicMock(), MagicMock(), MagicMock(call=silent), "me")
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await host.call("far", "method", b"", timeout_s=3)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(3)
        assert "far" not in host.called_peers()

    virtual_time.run(main())


def test_two_calls_can_find_at_once_that_an_introduced_peer_is_lost() -> None:
    async def main() -> None:
        control, unary = MagicMock(), MagicMock()
        host = Host(MagicMock(), control, unary, "me")
        host.introduced = {"far": "punched"}

        async def nobody() -> dict[str, tuple[str, ...]]:
            await asyncio.sleep(0)  # the daemon answers both before either continues
            return {}

        control.connected_peers = nobody
        unary.call = AsyncMock(side_effect=lambda *_: b"answer")
        answers = await asyncio.gather(*(host.call("far", "method", b"", addrs=()) for _ in range(2)))
        assert answers == [b"answer", b"answer"]
        assert host.introduced == {}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "cannot ask its libp2p daemon (Too many open files)"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "cannot ask its libp2p daemon (Resource"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "libp2p daemon has ended"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "libp2p daemon has ended"),
        (asyncio.IncompleteReadError(b"", 1), "libp2p daemon has ended"),
    ],
)
def test_lack_of_open_files_is_not_mistaken_for_the_daemon_s_end(error: Exception, message: str) -> None:
    async def main() -> None:
        control = MagicMock()
        control.connected_peers = control.identify = AsyncMock(side_effect=error)
        host = Host(MagicMock(), control, MagicMock(), PEER)
        for ask in (host.connected_peers, host.look, host.addrs):
            with pytest.raises(PeerUnreachable, match=re.escape(message)):
                await ask()

    asyncio.run(main())


def test_simultaneous_queries_of_the_connections_share_the_daemon_s_answer() -> None:
    async def main() -> None:
        control = MagicMock()
        control.connected_peers = AsyncMock(return_value={PEER: ()})
        host = Host(MagicMock(), control, MagicMock(), PEER)
        assert await asyncio.gather(*(host.connected_peers() for _ in range(40))) == [{PEER: ()}] * 40
        assert control.connected_peers.await_count <= 2

    asyncio.run(main())
