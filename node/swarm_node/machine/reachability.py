"""Explains to the person who runs a node what its reachability means, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.network.multiaddr import is_loopback, is_relayed
from swarm_protocol.records import Reachability

from swarm_node.formatting import Reach, reach

MEASURE_TIMEOUT_S = 3.0
"""Seconds for peers to dial a starting node back. `status` and the record show later results."""

EXAMINE_TIMEOUT_S = 10.0
"""The same for commands that were asked for the result."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Names the obstacle that keeps other nodes from reaching this one, and a remedy ("" if there is none)."""

    meaning: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.meaning}; {self.remedy}" if self.remedy else self.meaning


_OPEN_A_PORT = "a forwarded TCP port or UPnP would open it to all"
_LISTEN = "--listen /ip4/0.0.0.0/tcp/4001"
_MEANINGS: Mapping[Reach, Explanation] = {
    "public": Explanation("others reach this node directly"),
    "local network only": Explanation(
        "only from this machine and its local network", "a forwarded TCP port would let others in"
    ),
    "this machine only": Explanation("only from this machine, which has no network address", "connect it to a network"),
    "relay": Explanation(
        "behind a NAT or a firewall: direct paths to peers that allow them, relays to others", _OPEN_A_PORT
    ),
    "unknown": Explanation(
        "nobody has confirmed that others reach this node", "if they do not, forward a TCP port to it"
    ),
}
_SYMMETRIC = Explanation(
    "behind a NAT that uses another port for each peer: direct paths to public peers, relays to others", _OPEN_A_PORT
)
_LOCAL_LISTENER = Explanation(
    "only from this machine, because it does not listen beyond it", f"{_LISTEN} would let others in"
)
_NO_LISTENER = Explanation(
    "it does not listen beyond this machine, so nobody can connect to it: direct paths to public peers, relays to "
    "others",
    f"{_LISTEN} would allow more direct paths",
)


_RELAYS_YET = Explanation(
    "through relays; nobody has confirmed yet that others reach this node directly",
    "if they do not, forward a TCP port to it",
)


_LOCAL_PEERS = Explanation("only from this machine, where its peers are, too")


def explain(
    found: Reachability,
    addrs: Sequence[str],
    *,
    listens: bool,
    was_tested: bool,
    is_symmetric: bool,
    peer_addrs: Sequence[str] = (),
) -> Explanation:
    """Return the meaning of `found` for people, with a remedy.

    `addrs` are the announced addresses, and `peer_addrs` those of its peers. `listens` says whether peers beyond this
    machine could connect, `was_tested` whether any peer has answered that it tried to, and `is_symmetric` whether the
    NAT uses another port for each peer.
    """
    meaning = reach(found, addrs)
    if not listens and meaning in ("this machine only", "relay", "unknown"):
        local = _LOCAL_PEERS if peer_addrs and all(map(is_loopback, peer_addrs)) else _LOCAL_LISTENER
        return local if meaning == "this machine only" else _NO_LISTENER
    is_known_by_relays = meaning == "relay" or (meaning == "unknown" and any(map(is_relayed, addrs)))
    if is_known_by_relays and is_symmetric:
        return _SYMMETRIC
    is_untested = meaning == "unknown" or not was_tested  # no answer in time does not show that there is a NAT
    return _RELAYS_YET if is_known_by_relays and is_untested else _MEANINGS[meaning]
