"""`swarm-node gateway`: a daemon whose role is to speak HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_protocol.errors import ConfigError

from swarm_node.commands.daemons import live
from swarm_node.config import Config
from swarm_node.options import Flags

if TYPE_CHECKING:
    from swarm_node.node import Role


def run(flags: Flags) -> int:
    config = flags.resolve()
    if not config.peers:
        raise ConfigError(
            "no peer to join through is named",
            remedy="give --peers the address that a seed printed, or see it all at once: swarm-node demo",
        )
    return live(flags, config, _gateway_role)


def _gateway_role(_config: Config) -> Role:
    from swarm_node.gateway.role import GatewayRole  # noqa: PLC0415

    return GatewayRole()
