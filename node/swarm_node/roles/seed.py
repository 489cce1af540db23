"""A seed: other nodes find each other through it, and it relays for nodes behind a NAT."""

from __future__ import annotations

import shlex

from swarm.network.multiaddr import is_loopback, is_private
from swarm_protocol.network_invitation import owner_of

from swarm_node.node import Node, NodeRole, RelayUse
from swarm_node.settings.config import Config

DEFAULT_NETWORK = Config.model_fields["network_id"].default

PORT_CHANGES = "this address holds until the seed is started again; to keep it: --listen /ip4/0.0.0.0/tcp/4001\n"


class SeedRole(NodeRole):
    """The role of a seed. It ends only when asked to."""

    name = "seed"
    num_steps = 0

    def __init__(self, _config: Config) -> None: ...

    def relay(self, _config: Config) -> RelayUse:
        return "serve"

    async def run(self, node: Node) -> None:
        node.activity.state = "seeding"
        command = join_command(await node.network.addrs(), node.config.network_id)
        changes = any(addr.endswith("/tcp/0") for addr in node.config.listen)
        node.emitter.emit("invite", command=command, note=PORT_CHANGES if changes else "")
        await node.shutdown.leaving.wait()


def join_command(addrs: tuple[str, ...], network_id: str) -> str:
    """Return the command to run on other machines, with the address that most of them can use.

    A private network needs an invitation, which the command does not contain.
    """
    if owner_of(network_id) is not None:
        return "swarm-node join --invite FILE"
    best = sorted(addrs, key=lambda addr: (is_loopback(addr), is_private(addr)))[:1]
    words = ["swarm-node", "join", *(("--peers", *best) if best else ())]
    if network_id != DEFAULT_NETWORK:
        words += ["--network-id", network_id]
    return shlex.join(words)
