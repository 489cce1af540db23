"""What the reachability of a node means for the person who runs it, and what they can do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm_protocol.records import Reachability

from swarm_node.formatting import Reach, reach

MEASURE_TIMEOUT_S = 3.0
"""Time for peers to dial this node back. What they find later is shown by status, and told to others."""

_MEANINGS: Mapping[Reach, str] = {
    "public": "others reach this node directly",
    "local network only": "only from this machine and its local network; a forwarded TCP port lets others in",
    "this machine only": "only from this machine; --listen /ip4/0.0.0.0/tcp/4001 lets others in",
    "relay": "behind a NAT: a direct path where the other side allows one, relays elsewhere; a forwarded TCP port or "
    "UPnP would open it to all",
    "unknown": "nobody has confirmed that others reach this node; if they do not, forward a TCP port to it",
}

_SYMMETRIC = (
    "behind a NAT that uses another port for each peer: a direct path to public peers, relays elsewhere; a forwarded "
    "TCP port or UPnP would open it to all"
)
_NO_LISTENER = (
    "through relays only, as it does not listen beyond this machine; --listen /ip4/0.0.0.0/tcp/4001 allows direct paths"
)


def explain(found: Reachability, addrs: Sequence[str], *, listens: bool, is_symmetric: bool) -> str:
    """Return the meaning of `found` for people, with what they can do about it.

    `addrs` are announced; `listens` tells whether peers beyond this machine could connect, `is_symmetric` whether the
    NAT uses another port for each peer.
    """
    meaning = reach(found, addrs)
    if meaning == "relay" and not listens:
        return _NO_LISTENER
    return _SYMMETRIC if meaning == "relay" and is_symmetric else _MEANINGS[meaning]
