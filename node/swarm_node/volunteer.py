"""A volunteer"""

from __future__ import annotations

from swarm_node.config import Config
from swarm_node.node import Node, RelayUse


class Volunteer:
    num_steps = 2
    computes = True

    def __init__(self, config: Config) -> None:
        pass

    def relay(self, config: Config) -> RelayUse:
        return "none"

    async def run(self, node: Node) -> None:
        node.steps.done("takes", "nothing")
        node.steps.done("x", "nothing")
        await node.departure.leaving.wait()
