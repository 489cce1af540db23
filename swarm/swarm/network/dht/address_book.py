"""The addresses of peers, as each told them of itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact, contact_of

from swarm.network.multiaddr import dialable

MAX_PEERS = 1024
"""The routing table of a network of a million nodes twice over."""


class AddressBook:
    def __init__(self) -> None:
        self._contacts: OrderedDict[str, Contact] = OrderedDict()
        self._gone: set[str] = set()

    def learn(self, peer_id: str, addrs: Iterable[str]) -> None:
        """Take `addrs` from `peer_id` itself, in place of those that it gave before. Nothing if none can be dialled."""
        known = self._contacts.get(peer_id)
        if known is None or known.addrs != addrs:
            usable = dialable(addrs)[: limits.MAX_CONTACT_ADDRS]
            if not usable:
                return
            self._contacts[peer_id] = contact_of(peer_id=peer_id, addrs=usable)
        self._contacts.move_to_end(peer_id)
        if len(self._contacts) > MAX_PEERS:
            self._contacts.popitem(last=False)

    def forget_all_but(self, peers: Container[str]) -> None:
        """Forget who is not one of `peers`, and was not the last time either: who was lost just now may be dialled."""
        gone = {peer_id for peer_id in self._contacts if peer_id not in peers}
        for peer_id in gone & self._gone:
            del self._contacts[peer_id]
        self._gone = gone

    def __len__(self) -> int:
        return len(self._contacts)

    def of(self, peer_id: str) -> tuple[str, ...]:
        """The addresses that `peer_id` gave last; none if it is not known."""
        known = self._contacts.get(peer_id)
        return known.addrs if known is not None else ()

    def contact(self, peer_id: str) -> Contact:
        """Return `peer_id` as this node names it to others."""
        return self._contacts.get(peer_id) or contact_of(peer_id=peer_id)
