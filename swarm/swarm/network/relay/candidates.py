"""The peers that may be asked to relay for this node, in the order in which they are asked. Pure.

Relays and seeds that the operator named come first. Then come nodes of the routing table, in an order that differs
between nodes, so that not all of a network use the same relay. What they announce are claims: a relay is in use only
once it has answered at such an address, and has given a reservation.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from swarm_protocol.dht_messages import Contact

from swarm.network.ip_kinds import kind_of, provider_network_of
from swarm.network.multiaddr import PeerAddr, ip_of, is_loopback, is_private, is_relayed

MAX_RELAY_ADDRS = 2
"""Addresses of one relay that are dialled and announced, such as one of IPv4 and one of IPv6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCandidate:
    """`addrs` are without the final /p2p/<peer_id>. `is_given`: the operator named it."""

    peer_id: str
    addrs: tuple[str, ...]
    is_given: bool

    @property
    def networks(self) -> frozenset[str]:
        """The networks that its public addresses are in; without any it stands for itself. Relays in different ones
        hardly fail together."""
        ips = (ip_of(addr) for addr in self.addrs if is_public(addr))
        return frozenset(str(provider_network_of(ip)) for ip in ips if ip) or frozenset((self.peer_id,))


def is_public(addr: str) -> bool:
    """Return whether an address names its host by a public IP address, and leads there without a relay."""
    ip = ip_of(addr)
    return ip is not None and kind_of(ip) == "public" and not is_relayed(addr)


def candidates(
    own_peer_id: str, given: Iterable[PeerAddr], known: Iterable[Contact], takes: Callable[[str], bool] = is_public
) -> list[RelayCandidate]:
    """Return whom this node may ask. `takes` decides which addresses of a node that is only `known` are used."""
    found: dict[str, RelayCandidate] = {}
    named: dict[str, list[str]] = {}
    for addr in given:
        named.setdefault(addr.peer_id, []).append(addr.addr)
    for peer_id, addrs in named.items():
        direct = [addr for addr in addrs if not is_relayed(addr)]
        if direct:
            found[peer_id] = RelayCandidate(peer_id=peer_id, addrs=_best(direct), is_given=True)
    for contact in sorted(known, key=lambda contact: _rank(own_peer_id, contact.peer_id)):
        usable = [addr for addr in contact.addrs if takes(addr)]
        if usable and contact.peer_id not in found:
            found[contact.peer_id] = RelayCandidate(peer_id=contact.peer_id, addrs=_best(usable), is_given=False)
    found.pop(own_peer_id, None)
    return list(found.values())


def _best(addrs: Iterable[str]) -> tuple[str, ...]:
    """Return public addresses before others, and of each IP version one before a second one."""
    num_before: Counter[str] = Counter()
    ranked = []
    for addr in dict.fromkeys(addrs):
        kind = addr.split("/")[1]
        ranked.append((is_loopback(addr), is_private(addr), num_before[kind], addr))
        num_before[kind] += 1
    return tuple(addr for *_, addr in sorted(ranked, key=lambda each: each[:3])[:MAX_RELAY_ADDRS])


@lru_cache(maxsize=4096)
def _rank(own_peer_id: str, peer_id: str) -> bytes:
    return hashlib.sha256(f"{own_peer_id} {peer_id}".encode()).digest()
