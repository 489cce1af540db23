"""The doctor's checks that need others: are the seeds there, is our clock theirs, can they reach us.

A throwaway host with a throwaway identity asks, so that it can do so beside a running daemon.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from swarm.network.libp2p.libp2p_network import Libp2pNetwork, Libp2pOptions
from swarm.network.membership import Membership
from swarm.temporary_folder import temporary_folder
from swarm_protocol import limits
from swarm_protocol.errors import SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord
from swarm_protocol.version import software_version

from swarm_node import reachability
from swarm_node.config import Config
from swarm_node.doctor import Finding
from swarm_node.home import Home

NAMELESS = "doctor"


async def check_network(config: Config) -> Iterable[Finding]:
    """Join as somebody else, and look around."""
    if not config.peers:
        remedy = "give --peers the address of a seed"
        return [Finding(check="seeds", result="warn", message="no seed was named, so none was asked", remedy=remedy)]
    with temporary_folder("doctor") as folder:
        identity = folder / "identity.key"
        Identity.generate().save(identity)
        options = Libp2pOptions(
            identity_path=identity,
            network_id=config.network_id,
            peers=config.peers,
            listen=_listen(config),
            announce=config.announce,
        )
        try:
            async with await Libp2pNetwork.create(options) as network, Membership(network) as membership:
                return await _look_around(config, network, membership)
        except SwarmError as error:
            about = "clock" if "clock" in error.message else "seeds"
            return [Finding(check=about, result="fail", message=error.message, remedy=error.remedy)]


def _listen(config: Config) -> tuple[str, ...]:
    """The node's own addresses; where its daemon has them already, any free port beside them."""
    if Home(config.home).owner() is None:
        return config.listen
    return tuple("/".join([*addr.split("/")[:4], "0", *addr.split("/")[5:]]) for addr in config.listen)


async def _look_around(config: Config, network: Libp2pNetwork, membership: Membership) -> Iterable[Finding]:
    addrs = await network.addrs()
    membership.announce(
        NodeRecord(
            name=NAMELESS,
            version=software_version(),
            addrs=addrs[: limits.MAX_ADDRS],
            device=NAMELESS,
            memory_bytes=0,
            free_memory_bytes=0,
            reachability="unknown",
            started_at=time.time(),
            role="visitor",
        )
    )
    num_nodes = sum(record.role != "visitor" for record in (await membership.nodes()).values())
    found = await reachability.measure(network, network.entrance.peer_ids)
    reached = Finding(
        check="reachability",
        result="ok" if found == "public" else "warn",
        message=reachability.explain(found, addrs),
        remedy="" if found == "public" else "forward a port to this machine, and name it with --listen and --announce",
    )
    return [
        Finding(check="seeds", result="ok", message=f"joined {config.network_id}, which has {num_nodes} nodes"),
        Finding(check="clock", result="ok", message=f"within {limits.MAX_CLOCK_SKEW_S:.0f} s of the seeds'"),
        reached,
    ]
