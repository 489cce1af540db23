"""Joins a network: for a daemon until a peer answers, or briefly for a command, which tells a failure.

A machine may boot before its seed. From the second attempt on, the node can be reached while it waits, so two nodes
that name each other meet. A seed starts alone instead, and the network's `partition_watch` goes on dialling its peers.
A command visits as a host of its own with a temporary identity, which also works beside a running daemon.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from swarm.ended_tasks import unless
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.membership import Membership
from swarm.network.network_entry import NobodyReached
from swarm.network.traffic import Traffic
from swarm.temporary_folder import temporary_folder
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerTimeout
from swarm_protocol.identity import Identity

from swarm_node.events.emitter import Emitter
from swarm_node.node import NodeRole, RelayUse
from swarm_node.settings.config import Config
from swarm_node.shutdown import Shutdown
from swarm_node.storage import kept_invitation, remembered_peers
from swarm_node.storage.home import Home

T = TypeVar("T")

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


LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
FIND_S = 20.0
"""Longest search for members, in seconds. Live members are usually seen within two seconds."""
POLL_S = 1.0


@asynccontextmanager
async def visiting(
    config: Config,
    *,
    listen: tuple[str, ...] = LOOPBACK,
    announce: tuple[str, ...] = (),
    remembered: tuple[Contact, ...] = (),
    relay: RelayUse = "none",
    revocations: bytes | None = None,
) -> AsyncIterator[tuple[Libp2pNetwork, Membership]]:
    """Join the network of `config` through its peers, through `remembered` ones, or, if it listens beyond this machine,
    through nodes of the local network.

    `revocations` is the list to bring instead of the one that the home keeps. Raises StartError or PeerError.
    """
    if revocations is None:
        revocations = kept_invitation.read_revocations(Home(config.home)) if config.invite else b""
    with temporary_folder("visit") as folder:
        identity = folder / "identity.key"
        Identity.generate().save(identity)
        options = Libp2pOptions(
            identity_path=identity,
            network_id=config.network_id,
            peers=config.peers,
            remembered=remembered,
            listen=listen,
            announce=announce,
            relay=relay,
            mdns=config.mdns,
            invitation=config.invite,
            revocations=revocations,
        )
        network = await Libp2pNetwork.create(options)
        try:
            async with Membership(network) as membership:
                yield network, membership
        finally:
            await network.close()


async def retried(look_up: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `look_up`. It is repeated while it raises PeerTimeout, for at most FIND_S."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + FIND_S
    while True:
        try:
            return await look_up()
        except PeerTimeout:
            if loop.time() > until_s:
                raise
        await asyncio.sleep(POLL_S)
