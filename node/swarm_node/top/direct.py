"""The swarm itself as a source of views: a host of its own with a throwaway identity, and a dashboard's collector.

So it can look beside a running daemon. What it remembers of the swarm goes with it.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from swarm.network.libp2p import Libp2pNetwork, Libp2pOptions
from swarm.network.membership import Membership
from swarm.training.run_copy import fetch_run
from swarm_protocol.identity import Identity
from swarm_protocol.version import software_version

from swarm_node import logs
from swarm_node.config import Config
from swarm_node.dashboard.collector import Collector
from swarm_node.dashboard.history.history import History
from swarm_node.dashboard.picture import Place
from swarm_node.dashboard.remembering import Remembering
from swarm_node.seed import join_command

FIRST_S = 10.0
"""For a first picture: records arrive within a second or two of the connection."""

logger = logging.getLogger(__name__)


@asynccontextmanager
async def looking(config: Config) -> AsyncIterator[Collector]:
    """A collector that looks while the context lasts, and has seen nodes if there are any.

    Raises StartError or PeerError if no peer of `config` can be joined through.
    """
    logs.quieten_libraries()
    with tempfile.TemporaryDirectory(prefix="swarm-top-") as folder:
        identity = Path(folder, "identity.key")
        Identity.generate().save(identity)
        options = Libp2pOptions(identity_path=identity, network_id=config.network_id, peers=config.peers)
        network = await Libp2pNetwork.create(options)
        try:
            async with (
                Membership(network) as membership,
                History(
                    Path(folder, "history.sqlite"), on_warning=lambda error: logger.warning("%s", error)
                ) as history,
                _collecting(network, membership, history, config) as collector,
            ):
                yield collector
        finally:
            await network.close()


@asynccontextmanager
async def _collecting(
    network: Libp2pNetwork, membership: Membership, history: History, config: Config
) -> AsyncIterator[Collector]:
    place = Place(
        network_id=network.network_id,
        version=software_version(),
        join_command=join_command(config.peers, config.network_id),
    )
    collector = Collector(network, membership, Remembering(history), place=place, fetch_run=fetch_run)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(collector.keep_looking(), name="look at the swarm")
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                while not collector.overview().num_nodes:
                    await collector.wait_changed()
        yield collector
        task.cancel()
