"""Runs a collector with its history and its task, for a daemon and for `swarm-node top`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.run.run_copy import fetch_run
from swarm_protocol.errors import ConfigError, SwarmError
from swarm_protocol.version import software_version

from swarm_node.dashboard.checkpoints import Checkpoints
from swarm_node.dashboard.collector import Collector
from swarm_node.dashboard.history.database import sqlite_file, url_of
from swarm_node.dashboard.history.history import DashboardHistory
from swarm_node.dashboard.view_builder import NetworkInfo
from swarm_node.node import Node
from swarm_node.roles.seed import join_command
from swarm_node.settings.config import Config


def collecting(node: Node) -> AbstractAsyncContextManager[Collector]:
    """Run a daemon's collector, as `running_collector`. Raises ConfigError where the history's directory is missing."""

    def warn(error: SwarmError) -> None:
        node.emitter.emit("warning", message=error.message, remedy=error.remedy)

    place = node.config.history or node.home.path / "history.sqlite"
    file = sqlite_file(url_of(place))
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"there is no directory {file.parent} to keep the history in", remedy="check --history")
    return running_collector(node.network, node.membership, node.config, place, on_warning=warn)


@asynccontextmanager
async def running_collector(
    network: Network,
    membership: Membership,
    config: Config,
    place: Path | str,
    *,
    on_warning: Callable[[SwarmError], None] | None = None,
) -> AsyncIterator[Collector]:
    """Run a collector while the context lasts; it keeps its history in `place`.

    Raises ConfigError for a history that cannot be one.
    """
    async with DashboardHistory(place, on_warning=on_warning) as history:
        collector = Collector(
            network,
            membership,
            history,
            info=NetworkInfo(
                network_id=network.network_id,
                version=software_version(),
                join_command=join_command(config.peers, config.network_id),
            ),
            fetch_run=fetch_run,
            checkpoints=checkpoints(config),
        )
        async with asyncio.TaskGroup() as tasks:
            polling = tasks.create_task(collector.run_forever(), name="dashboard")
            yield collector
            polling.cancel()


def checkpoints(config: Config) -> Checkpoints | None:
    """Return the checkpoints that this machine gives away. Raises ConfigError where their folder is missing."""
    if config.checkpoints is None:
        return None
    if not config.checkpoints.is_dir():
        raise ConfigError(f"there is no directory {config.checkpoints}", remedy="check --checkpoints")
    return Checkpoints(config.checkpoints)
