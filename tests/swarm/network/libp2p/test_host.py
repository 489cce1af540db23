"""What a host's caller is told when the libp2p daemon ends in the middle of a request: over scripted sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import pytest
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.host import Host
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity

PEER = Identity(bytes(32)).peer_id


class Dying:
    """A daemon's control socket and unary connection: it reports that it reached nobody, and dies when told to dial."""

    async def call(self, _peer_id: str, _protocol: str, _request: bytes) -> bytes:
        raise ControlError("failed to dial: no addresses")

    async def connect(self, _peer_id: str, _addrs: Sequence[str]) -> None:
        raise ConnectionRefusedError("the socket is gone")


async def _somewhere(_peer_id: str) -> AsyncGenerator[Sequence[str], None]:
    yield ("/ip4/192.0.2.7/tcp/4001",)


def test_call_whose_dial_finds_the_daemon_gone_is_a_peer_that_is_unreachable() -> None:
    async def main() -> None:
        host = Host(cast("Any", None), cast("Any", Dying()), cast("Any", Dying()), PEER)
        host.find_addrs = _somewhere
        with pytest.raises(PeerUnreachable):
            await host.call(PEER, "method", b"")

    asyncio.run(main())
