"""The addresses that peers announce of themselves: a DHT node dials these, and names them to others. Pure.

A node names a peer to others only by the addresses that this peer itself gave: the transport vouches for who said it,
and nothing vouches for the addresses. A dial there succeeds only if the peer's key answers. What others say of a peer
is tried once, and never kept here. State belongs to the DHT.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from swarm_protocol import limits

from swarm.network.multiaddr import dialable, is_loopback

MAX_PEERS = 4096
"""About the routing table of a very large network twice over; half a megabyte."""


class AddressBook:
    def __init__(self) -> None:
        self._addrs: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def learn(self, peer_id: str, addrs: Iterable[str]) -> None:
        """Take `addrs` from `peer_id` itself, in place of those that it gave before. Nothing if none can be dialled."""
        usable = dialable(addrs)[: limits.MAX_CONTACT_ADDRS]
        if not usable:
            return
        self._addrs[peer_id] = usable
        self._addrs.move_to_end(peer_id)
        if len(self._addrs) > MAX_PEERS:
            self._addrs.popitem(last=False)

    def of(self, peer_id: str) -> tuple[str, ...]:
        """The addresses that `peer_id` gave last; none if it is not known."""
        return self._addrs.get(peer_id, ())


def to_announce(addrs: Iterable[str]) -> tuple[str, ...]:
    """Return the part of a host's own `addrs` that is announced: relays and publicly reachable addresses first."""
    ranked = sorted(dialable(addrs), key=lambda addr: (is_loopback(addr), "/p2p-circuit" not in addr))
    return tuple(dict.fromkeys(ranked))[: limits.MAX_CONTACT_ADDRS]
