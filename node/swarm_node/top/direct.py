"""The swarm itself as a source of views: a host of its own with a throwaway identity, and a dashboard's collector.

So it can look beside a running daemon. What it remembers of the swarm goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from swarm.network.libp2p.libp2p_network import Libp2pNetwork, Libp2pOptions
from swarm.network.membership import Membership
from swarm.temporary_folder import temporary_folder
from swarm_protocol.identity import Identity

from swarm_node import logs
from swarm_node.config import Config
from swarm_node.dashboard.collector import Collector
from swarm_node.dashboard.showing import looking_through

FIRST_S = 10.0
"""For a first picture: records arrive within a second or two of the connection."""


@asynccontextmanager
async def looking(config: Config) -> AsyncIterator[Collector]:
    """A collector that looks while the context lasts, and has seen nodes if there are any.

    Raises StartError or PeerError if no peer of `config` can be joined through.
    """
    logs.quieten_libraries()
    with temporary_folder("top") as folder:
        identity = folder / "identity.key"
        Identity.generate().save(identity)
        options = Libp2pOptions(identity_path=identity, network_id=config.network_id, peers=config.peers)
        network = await Libp2pNetwork.create(options)
        try:
            async with (
                Membership(network) as membership,
                looking_through(network, membership, config, folder / "history.sqlite") as collector,
            ):
                await _have_seen(collector)
                yield collector
        finally:
            await network.close()


async def _have_seen(collector: Collector) -> None:
    """Some node, or that there is none."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_S):
            while not collector.overview().num_nodes:
                await collector.wait_changed()
