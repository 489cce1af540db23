"""A node that is to take no work (`--take nothing`): it is seen, and it waits. Loads nothing for training or serving.

Its device and speed are found out for whoever plans with it, which takes torch, unless it is told both.
"""

from __future__ import annotations

from swarm.network.multiaddr import is_loopback

from swarm_node.config import Config
from swarm_node.node import Node, RelayUse, RoleName


class StandBy:
    """A role that ends only when told to."""

    name: RoleName = "volunteer"
    num_steps = 2

    def __init__(self, config: Config) -> None:
        self.computes = config.device != "cpu" or config.probe != "off"

    def relay(self, config: Config) -> RelayUse:
        return relay_use(config)

    async def run(self, node: Node) -> None:
        node.activity.state = "idle"
        node.steps.done("takes", f"no work: as told by {node.config.origin('take')}")
        node.steps.done("standing by", "join again without it, or with --run RUN to train or --model MODEL to serve")
        await node.departure.leaving.wait()


def relay_use(config: Config) -> RelayUse:
    """Unless told, a relay is used where a peer beyond this machine could be one and nobody else's way is open."""
    if config.relay != "auto":
        return "use" if config.relay == "use" else "none"
    is_local = all(map(is_loopback, config.peers))
    return "none" if is_local or config.announce else "use"
