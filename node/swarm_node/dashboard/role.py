"""The node's part as a dashboard: it looks at the swarm and shows it over HTTP. Public, read-only, without a key.

Beyond this machine it listens only where `--host` says so.
"""

from __future__ import annotations

from swarm_node.dashboard.app import create_dashboard
from swarm_node.dashboard.collector import checkpoints, daemon_collector
from swarm_node.http.addresses import checked
from swarm_node.http.server import is_local, listen, serving
from swarm_node.node import Node, NodeRole
from swarm_node.settings.config import Config


class DashboardRole(NodeRole):
    """Serves pages and API until the node leaves. The port is bound with construction, as a gateway's is.

    Raises StartError if it cannot listen.
    """

    def __init__(self, config: Config) -> None:
        self._listener = listen(config.host, config.port)

    async def run(self, node: Node) -> None:
        async with daemon_collector(node) as collector:
            app = create_dashboard(collector, checkpoints=checkpoints(node.config))
            async with serving(checked(app, node.config), self._listener) as url:
                node.activity.state = "dashboard"
                whom = "this machine" if is_local(node.config.host) else "anyone who reaches it"
                node.steps.done("dashboard", f"pages for {whom}, read-only")
                node.emitter.emit("dashboard", url=url)
                await node.shutdown.leaving.wait()
                app.state.live.close()
