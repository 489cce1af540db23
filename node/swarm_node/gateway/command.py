"""`swarm-node gateway`: a daemon whose role is to speak HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_node.commands.command_options import Flags
from swarm_node.commands.daemons import live
from swarm_node.settings.config import Config

if TYPE_CHECKING:
    from swarm_node.node import NodeRole


def run(flags: Flags) -> int:
    return live(flags, flags.resolve(), _gateway_role, joins=True)


def _gateway_role(config: Config) -> NodeRole:
    from swarm_node.gateway.role import GatewayRole  # noqa: PLC0415

    return GatewayRole(config)
