"""Looks at a network from a host of its own, under a throwaway identity: also beside a running daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from swarm.network.interface import Network
from swarm.network.libp2p.libp2p_network import Libp2pNetwork, Libp2pOptions
from swarm.network.membership import Membership
from swarm.temporary_folder import temporary_folder
from swarm_protocol.errors import PeerTimeout
from swarm_protocol.identity import Identity

from swarm_node.config import Config

T = TypeVar("T")

FIND_S = 20.0
"""Members that are there are seen within a second or two."""
LOOK_S = 1.0


@asynccontextmanager
async def visiting(config: Config) -> AsyncIterator[tuple[Network, Membership]]:
    """A host on the network of `config`, through its peers. Raises StartError."""
    with temporary_folder("visit") as folder:
        identity = folder / "identity.key"
        Identity.generate().save(identity)
        options = Libp2pOptions(identity_path=identity, network_id=config.network_id, peers=config.peers)
        network = await Libp2pNetwork.create(options)
        try:
            async with Membership(network) as membership:
                yield network, membership
        finally:
            await network.close()


async def found(look: Callable[[], Awaitable[T]]) -> T:
    """What `look` finds. Raises PeerTimeout if it still does so after FIND_S."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + FIND_S
    while True:
        try:
            return await look()
        except PeerTimeout:
            if loop.time() > until_s:
                raise
        await asyncio.sleep(LOOK_S)
