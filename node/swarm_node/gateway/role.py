"""The node's part as a gateway: a client of the swarm on one side, an HTTP server on the other, in one loop."""

from __future__ import annotations

from swarm.client import AsyncClient

from swarm_node.config import Config
from swarm_node.gateway.app import create_app
from swarm_node.gateway.server import serving
from swarm_node.node import Node, RelayUse


class GatewayRole:
    """Serves HTTP until told to leave; running answers then get the daemon's grace to finish."""

    num_steps = 1
    computes = False

    def relay(self, _config: Config) -> RelayUse:
        """Nobody needs to reach a gateway's libp2p host."""
        return "none"

    async def run(self, node: Node) -> None:
        """Raises StartError if the address cannot be listened on."""
        client = AsyncClient(network=node.network, membership=node.membership)
        async with serving(create_app(client), node.config.host, node.config.port) as url:
            node.activity.state = "gateway"
            node.steps.done("gateway", f"OpenAI's API under {url}/v1")
            node.emitter.emit("listening", url=url)
            await node.departure.leaving.wait()
