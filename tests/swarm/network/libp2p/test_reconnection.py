"""What a peer's announced addresses tell of whether it is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from swarm.network.libp2p.host import Host
from swarm.network.libp2p.reconnection import Reconnector
from swarm_protocol.identity import Identity

PEER = Identity(b"1" * 32).peer_id


def test_name_that_cannot_be_looked_up_tells_nothing() -> None:
    name = f"/dns4/{64 * 'a'}.example/tcp/1"
    host = cast(Host, SimpleNamespace(known_addrs=lambda _peer_id: (name,)))
    assert not asyncio.run(Reconnector(host)._refuses(PEER))
