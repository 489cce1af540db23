"""Holds what a daemon needs to show the swarm: the history, and the collector's task. Owned by whoever enters it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.training.run_copy import fetch_run
from swarm_protocol.errors import SwarmError
from swarm_protocol.version import software_version

from swarm_node.config import Config
from swarm_node.dashboard.checkpoints import Checkpoints
from swarm_node.dashboard.collector import Collector
from swarm_node.dashboard.history.history import History
from swarm_node.dashboard.picture import Place
from swarm_node.dashboard.remembering import Remembering
from swarm_node.node import Node
from swarm_node.seed import join_command


@asynccontextmanager
async def collecting(node: Node) -> AsyncIterator[Collector]:
    """A collector that looks while the context lasts. Raises ConfigError for a history that cannot be one."""

    def warn(error: SwarmError) -> None:
        node.emitter.emit("warning", message=error.message, remedy=error.remedy)

    config = node.config
    place = config.history or node.home.path / "history.sqlite"
    async with History(place, on_warning=warn) as history:
        collector = Collector(
            node.network,
            node.membership,
            Remembering(history),
            place=Place(
                network_id=node.network.network_id,
                version=software_version(),
                join_command=join_command(config.peers, config.network_id),
            ),
            fetch_run=fetch_run,
            checkpoints=checkpoints(config),
        )
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(collector.keep_looking(), name="dashboard")
            yield collector
            looking.cancel()


def checkpoints(config: Config) -> Checkpoints | None:
    return None if config.checkpoints is None else Checkpoints(config.checkpoints)
