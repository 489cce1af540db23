"""The command that the dashboard gives visitors who want to join: through a seed that is there now. Pure.

Of other nodes no address is shown: volunteers did not agree to be named to every visitor of a web page. What a seed
announces is its claim: who runs the command dials that address, where only the seed itself can answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm.network.discovery.peer_names import check_peer, is_named
from swarm.network.multiaddr import is_relayed
from swarm_protocol.errors import ConfigError
from swarm_protocol.records import NodeRecord

from swarm_node.formatting import reach
from swarm_node.roles.seed import join_command

_REACHES = ("public", "local network only")


def invitation(given: Sequence[str], nodes: Mapping[str, NodeRecord], network_id: str) -> str:
    """Return the command to join through one of the `given` peers, or, if none is there any more, through another seed
    that others reach directly. `nodes` are the records of the nodes that are known, by peer id.

    A name goes before all, as it leads to the nodes that serve as seeds now.
    """
    alive = {peer_id: record for peer_id, record in nodes.items() if record.state == "alive"}
    names = tuple(addr for addr in given if is_named(addr))
    present = tuple(addr for addr in given if addr.rpartition("/")[2] in alive)
    return join_command(names[:1] or present or _other_seed(alive) or tuple(given), network_id)


def _other_seed(alive: Mapping[str, NodeRecord]) -> tuple[str, ...]:
    """Return the direct addresses of a seed that others reach, of several the one that has been there longest."""
    reached = [
        (_REACHES.index(found), record.started_at, peer_id)
        for peer_id, record in alive.items()
        if record.role == "seed" and (found := reach(record.reachability, record.addrs)) in _REACHES
    ]
    for *_, peer_id in sorted(reached):
        if addrs := tuple(addr for addr in alive[peer_id].addrs if _leads_to(addr, peer_id)):
            return addrs
    return ()


def _leads_to(addr: str, peer_id: str) -> bool:
    """Return whether an address is valid and leads to the peer itself; a node can write anything there."""
    try:
        return check_peer(addr).endswith(f"/p2p/{peer_id}") and not is_relayed(addr)
    except ConfigError:
        return False
