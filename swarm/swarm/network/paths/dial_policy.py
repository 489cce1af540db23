"""Decides which addresses of a peer are worth a dial, and which of our own are told to others.

A peer may announce any address, also one of somebody's printer. Public IP addresses are dialled. Private and loopback
ones are dialled only where this node's network lives there, as its own addresses and the peers it was given show.
Names are not looked up for a peer: what they lead to would be the peer's choice anew at each dial. A relay inside an
address is dialled, too, and so is judged likewise.

Every address that came from a peer passes here before it reaches the daemon. Those of the operator do not, and neither
do those of mDNS, which `discovery` holds against the subnets of the interface. Pure, but for `of_machine`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from swarm_protocol import limits

from swarm.network.discovery.own_networks import own_subnets
from swarm.network.ip_kinds import IpAddress, ip4_inside, kind_of, local_network_of
from swarm.network.multiaddr import dialable, ip_of, is_loopback, is_private, is_relayed, relay_addr_of, relay_of

_LOOPBACK = "/ip4/127.0.0.1"


class DialPolicy:
    """Judges addresses by what is known of this node's networks and connections at one moment."""

    def __init__(
        self,
        *,
        own: Sequence[str],
        given: Sequence[str],
        met: Sequence[str] = (),
        connected: Collection[str] = (),
    ) -> None:
        """`own`: this node's interface addresses; `given`: addresses that its operator named; `met`: where the peers
        are that are connected now; `connected`: those that are connected without a relay, by peer id."""
        direct = [addr for addr in (*own, *met) if not is_relayed(addr)]
        # of a node that listens nowhere and is connected to nobody, nothing shows that its network is this machine
        is_here_alone = bool(direct) and all(map(is_loopback, (*direct, *given)))
        self._takes_loopback = is_here_alone or any(map(is_loopback, (*given, *met)))
        self._takes_private = any(kind_of(ip) == "private" for ip in _ips(given))
        self._subnets = {local_network_of(ip) for ip in _ips(direct)}
        self._connected = connected

    @classmethod
    def of_machine(cls, *, listen: Sequence[str], given: Sequence[str]) -> DialPolicy:
        """Return the policy of a node that is not running: by the networks of its machine. If it listens on loopback
        alone, its network may be this machine."""
        own = [f"/ip{each.address.version}/{each.address}" for each in own_subnets()]
        return cls(own=own, given=(*given, _LOOPBACK) if all(map(is_loopback, listen)) else given)

    def takes(self, addr: str) -> bool:
        """Return whether a peer may have this node dial the address."""
        if is_relayed(addr):
            # the daemon dials a relay that is not connected
            return relay_of(addr) in self._connected or self.takes(relay_addr_of(addr))
        ip = ip_of(addr)
        if ip is None or ip4_inside(ip) is not None:  # no host announces an IPv4 address in this form
            return False
        kind, is_near = kind_of(ip), local_network_of(ip) in self._subnets
        return (
            kind == "public"
            or (kind == "loopback" and self._takes_loopback)
            or (kind == "private" and (self._takes_private or is_near))
            or (kind == "link-local" and ip.version == 4 and is_near)  # of IPv6 a zone would have to be told
        )

    def told_daemon(self, addr: str) -> str:
        """Return a relayed address as the daemon is told it: with the relay's id alone if it is not worth a dial."""
        is_worth = self.takes(relay_addr_of(addr))
        return addr if is_worth else f"/p2p/{relay_of(addr)}/p2p-circuit"

    def worth_dialling(self, addrs: Iterable[str]) -> tuple[str, ...]:
        """Return the direct addresses among `addrs` that this node dials."""
        return tuple(addr for addr in self.worth_knowing(addrs) if not is_relayed(addr))

    def worth_knowing(self, addrs: Iterable[str]) -> tuple[str, ...]:
        """Return those of `addrs` that this node dials, also through relays."""
        return tuple(filter(self.takes, dialable(addrs)))


def to_announce(direct: Iterable[str], relayed: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses that others are told: public ones, those through relays, private ones, loopback last."""
    ranked = sorted(dialable((*direct, *relayed)), key=lambda addr: (is_loopback(addr), _rank(addr)))
    return tuple(dict.fromkeys(ranked))[: limits.MAX_CONTACT_ADDRS]


def _rank(addr: str) -> int:
    return 1 if is_relayed(addr) else 2 if is_private(addr) else 0


def _ips(addrs: Iterable[str]) -> list[IpAddress]:
    return [ip for addr in addrs if (ip := ip_of(addr)) is not None]
