"""Joins a network as a client: a libp2p host under a fresh identity, which lives as long as its context."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import NetworkInvitation

from swarm.network.interface import Network
from swarm.temporary_folder import temporary_folder


@asynccontextmanager
async def joined_network(
    peers: Sequence[str], network_id: str, invitation: NetworkInvitation | None
) -> AsyncIterator[Network]:
    """Join a network through a libp2p daemon, under a fresh identity. Raises StartError, and ConfigError without
    peers."""
    if not peers:
        raise ConfigError(
            "a client needs the address of a node: alone it would be a network of its own",
            remedy="give peers=[…], one or more of the addresses that `swarm-node status` shows",
        )
    # imported here, since only this function needs the go-libp2p daemon
    from swarm.network.libp2p.libp2p_options import Libp2pOptions  # noqa: PLC0415
    from swarm.network.libp2p_network import Libp2pNetwork  # noqa: PLC0415

    with temporary_folder("client") as folder:
        identity_path = folder / "identity"
        Identity.generate().save(identity_path)
        options = Libp2pOptions(
            identity_path=identity_path, network_id=network_id, peers=tuple(peers), invitation=invitation
        )
        network = await Libp2pNetwork.create(options)
        try:
            yield network
        finally:
            await network.close()
