"""`swarm-node dashboard`: a daemon whose role is to show the swarm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_node.commands.command_options import Flags
from swarm_node.commands.daemons import live
from swarm_node.settings.config import Config

if TYPE_CHECKING:
    from swarm_node.node import NodeRole


def run(flags: Flags) -> int:
    return live(flags, flags.resolve(), _dashboard_role, joins=True)


def _dashboard_role(config: Config) -> NodeRole:
    from swarm_node.dashboard.role import DashboardRole  # noqa: PLC0415

    return DashboardRole(config)
