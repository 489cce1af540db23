"""Joins the daemon's network as the home's identity, and keeps trying until a peer answers.

A machine may boot before its seed. From the second attempt on, the node can be reached while it waits, so two nodes
that name each other meet. A seed starts alone instead, and the network's `partition_watch` goes on dialling its peers.
`network_visit` joins for a command, which tells a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from swarm.ended_tasks import unless
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.network_entry import NobodyReached
from swarm.network.traffic import Traffic

from swarm_node.events.emitter import Emitter
from swarm_node.node import NodeRole
from swarm_node.settings.config import Config
from swarm_node.shutdown import Shutdown
from swarm_node.storage import kept_invitation, remembered_peers
from swarm_node.storage.home import Home

MIN_PAUSE_S, MAX_PAUSE_S = 5.0, 15.0
"""Bounds of the pause between two attempts. It is random, so that nodes that wait for one seed do not come at once."""

PATIENCE_S = 15.0
"""Time for which a node waits for its peers within an attempt, each of which looks names up and tries remembered
peers."""


async def join_network(
    config: Config,
    home: Home,
    role: NodeRole,
    traffic: Traffic,
    emitter: Emitter,
    shutdown: Shutdown,
    *,
    on_nobody: Callable[[str], None],
) -> Libp2pNetwork | None:
    """Return the network once a peer has answered, or None if the node is told to leave first.

    While nobody answers, each new reason is a warning, and `on_nobody` is called with it. Raises ConfigError or
    StartError for what waiting does not mend.
    """
    told = ""
    async with AsyncExitStack() as while_waiting:
        while not shutdown.leaving.is_set():
            try:
                options = _options(config, home, role)
                options = replace(options, patience_s=PATIENCE_S) if told else options
                network = await unless(shutdown.leaving, Libp2pNetwork.create(options, traffic))
            except NobodyReached as error:
                if not told:
                    await while_waiting.enter_async_context(role.waiting())
                if error.message != told:
                    told = error.message
                    on_nobody(told)
                    emitter.warning(f"{told}; this node keeps trying", remedy=error.remedy)
                await shutdown.wait(random.uniform(MIN_PAUSE_S, MAX_PAUSE_S))
            else:
                if network is None:
                    break
                if alone := network.entry.unreached:
                    emitter.warning(f"{alone.message}; this seed starts alone and keeps trying", remedy=alone.remedy)
                if wrong := network.entry.clock_error:
                    emitter.warning(f"{wrong.message}, unless that is wrong itself", remedy=wrong.remedy)
                if config.invite is not None:
                    kept_invitation.keep(home, config.invite)
                return network
    return None


def _options(config: Config, home: Home, role: NodeRole) -> Libp2pOptions:
    known = remembered_peers.remembered(config)
    return Libp2pOptions(
        identity_path=home.identity,
        network_id=config.network_id,
        peers=config.peers,
        remembered=tuple(each.contact for each in known),
        may_be_first=role.name == "seed",
        relays=tuple(f"{addr}/p2p/{each.peer_id}" for each in known if each.relays for addr in each.addrs),
        listen=config.listen,
        announce=config.announce,
        mdns=config.mdns,
        relay_bytes_per_s=config.relay_rate,
        relay=role.relay(config),
        invitation=config.invite,
        revocations=kept_invitation.read_revocations(home) if config.invite else b"",
    )
