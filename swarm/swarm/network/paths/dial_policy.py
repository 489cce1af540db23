"""Decides which addresses of a peer are worth a dial, and which of this node's addresses are announced.

A peer may announce any address, such as that of a stranger's printer. Public IP addresses are dialled. Private and
loopback ones are dialled only if this node's own addresses, its given peers or its connections show that its network is
there. A peer's host names are not looked up, since the peer could let them lead elsewhere at each dial. The relay
inside a relayed address is dialled, too, so the same rules hold for it.

Every address from a peer is checked here before it reaches the daemon. The operator's addresses are not, and neither
are those from mDNS, which `discovery` checks against the subnets of the interface. Pure, except for `of_machine`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from swarm_protocol import limits

from swarm.network.discovery.own_networks import own_subnets
from swarm.network.ip_kinds import IpAddress, ip4_inside, kind_of, local_network_of
from swarm.network.multiaddr import dialable, ip_of, is_loopback, is_private, is_relayed, relay_addr_of, relay_of

_LOOPBACK = "/ip4/127.0.0.1"


class DialPolicy:
    """Judges addresses by this node's networks and connections at one moment."""

    def __init__(
        self,
        *,
        own: Sequence[str],
        given: Sequence[str],
        met: Sequence[str] = (),
        connected: Collection[str] = (),
    ) -> None:
        """`own` are the daemon's own addresses, `given` those that the operator named, and `met` those of the peers
        that are connected now. `connected` are the ids of the peers that are connected without a relay."""
        direct = [addr for addr in (*own, *met) if not is_relayed(addr)]
        # a node that neither listens nor is connected has no sign that its network is this machine
        is_here_alone = bool(direct) and all(map(is_loopback, (*direct, *given)))
        self._takes_loopback = is_here_alone or any(map(is_loopback, (*given, *met)))
        self._takes_private = any(kind_of(ip) == "private" for ip in _ips(given))
        self._subnets = {local_network_of(ip) for ip in _ips(direct)}
        self._connected = connected

    @classmethod
    def of_machine(cls, *, listen: Sequence[str], given: Sequence[str]) -> DialPolicy:
        """Return the policy of a node that has not started yet, by the networks of its machine. If it is to listen on
        loopback alone, its network may be this machine."""
        own = [f"/ip{each.address.version}/{each.address}" for each in own_subnets()]
        return cls(own=own, given=(*given, _LOOPBACK) if all(map(is_loopback, listen)) else given)

    def takes(self, addr: str) -> bool:
        """Return whether a peer may have this node dial the address."""
        if is_relayed(addr):
            # the daemon would dial a relay that is not connected
            return self.is_through_connected(addr) or self.takes(relay_addr_of(addr))
        ip = ip_of(addr)
        if ip is None or ip4_inside(ip) is not None:  # no host announces an IPv4 address inside an IPv6 address
            return False
        kind, is_near = kind_of(ip), local_network_of(ip) in self._subnets
        return (
            kind == "public"
            or (kind == "loopback" and self._takes_loopback)
            or (kind == "private" and (self._takes_private or is_near))
            or (kind == "link-local" and ip.version == 4 and is_near)  # those of IPv6 would need a zone
        )

    def is_through_connected(self, addr: str) -> bool:
        """Return whether the address leads through a relay that is connected, so that no address is dialled."""
        return relay_of(addr) in self._connected

    def told_daemon(self, addr: str) -> str:
        """Return a relayed address for the daemon: with the relay's id alone if the relay's address is not worth a
        dial."""
        is_worth = self.takes(relay_addr_of(addr))
        return addr if is_worth else f"/p2p/{relay_of(addr)}/p2p-circuit"

    def worth_knowing(self, addrs: Iterable[str]) -> tuple[str, ...]:
        """Return those of `addrs` that this node dials, including relayed ones."""
        return tuple(filter(self.takes, dialable(addrs)))


def to_announce(direct: Iterable[str], relayed: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses to announce: public ones first, then relayed, private and loopback ones."""
    ranked = sorted(dialable((*direct, *relayed)), key=lambda addr: (is_loopback(addr), _rank(addr)))
    return tuple(dict.fromkeys(ranked))[: limits.MAX_CONTACT_ADDRS]


def _rank(addr: str) -> int:
    return 1 if is_relayed(addr) else 2 if is_private(addr) else 0


def _ips(addrs: Iterable[str]) -> list[IpAddress]:
    return [ip for addr in addrs if (ip := ip_of(addr)) is not None]
