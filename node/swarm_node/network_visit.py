"""Joins a network briefly, as a host of its own with a temporary identity. This also works beside a running daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.membership import Membership
from swarm.temporary_folder import temporary_folder
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerTimeout
from swarm_protocol.identity import Identity

from swarm_node.node import RelayUse
from swarm_node.settings.config import Config
from swarm_node.storage.home import Home
from swarm_node.storage.kept_invitation import read_revocations

T = TypeVar("T")

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
FIND_S = 20.0
"""Longest search for members, in seconds. Live members are usually seen within two seconds."""
POLL_S = 1.0


@asynccontextmanager
async def visiting(
    config: Config,
    *,
    listen: tuple[str, ...] = LOOPBACK,
    announce: tuple[str, ...] = (),
    remembered: tuple[Contact, ...] = (),
    relay: RelayUse = "none",
    revocations: bytes | None = None,
) -> AsyncIterator[tuple[Libp2pNetwork, Membership]]:
    """Join the network of `config` through its peers, through `remembered` ones, or, if it listens beyond this machine,
    through nodes of the local network.

    `revocations` is the list to bring instead of the one that the home keeps. Raises StartError or PeerError.
    """
    if revocations is None:
        revocations = read_revocations(Home(config.home)) if config.invite else b""
    with temporary_folder("visit") as folder:
        identity = folder / "identity.key"
        Identity.generate().save(identity)
        options = Libp2pOptions(
            identity_path=identity,
            network_id=config.network_id,
            peers=config.peers,
            remembered=remembered,
            listen=listen,
            announce=announce,
            relay=relay,
            mdns=config.mdns,
            invitation=config.invite,
            revocations=revocations,
        )
        network = await Libp2pNetwork.create(options)
        try:
            async with Membership(network) as membership:
                yield network, membership
        finally:
            await network.close()


async def retried(look_up: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `look_up`. It is repeated while it raises PeerTimeout, for at most FIND_S."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + FIND_S
    while True:
        try:
            return await look_up()
        except PeerTimeout:
            if loop.time() > until_s:
                raise
        await asyncio.sleep(POLL_S)
