"""Decides which addresses of a peer are worth a dial, and which of our own are told to others. Pure.

A peer may announce any address, also one of somebody's printer. Public addresses are dialled. Private and loopback
ones are dialled only where this node's network lives there, as its own addresses and the peers it was given show.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from swarm_protocol import limits

from swarm.network.multiaddr import dialable, ip_of, is_loopback, is_private, is_relayed

_SUBNET_BITS = {4: 24, 6: 64}
"""The size of a local network whose mask is unknown: what home routers use."""


class DialPolicy:
    def __init__(self, *, own: Sequence[str], given: Sequence[str], met: Sequence[str] = ()) -> None:
        """`own`: this node's interface addresses; `given`: addresses that its operator named; `met`: where the peers
        are that are connected now."""
        direct = [addr for addr in (*own, *met) if not is_relayed(addr)]
        self._takes_loopback = any(map(is_loopback, (*given, *met))) or all(map(is_loopback, direct))
        self._takes_private = any(is_private(addr) and not is_loopback(addr) for addr in given)
        self._subnets = {_subnet(addr) for addr in direct if is_private(addr) and not is_loopback(addr)}

    def takes(self, addr: str) -> bool:
        """Return whether a peer may have this node dial the address."""
        if is_loopback(addr):
            return self._takes_loopback
        return not is_private(addr) or self._takes_private or _subnet(addr) in self._subnets

    def worth_dialling(self, addrs: Iterable[str]) -> tuple[str, ...]:
        """Return the direct addresses among `addrs` that this node dials."""
        return tuple(addr for addr in dialable(addrs) if not is_relayed(addr) and self.takes(addr))

    def worth_knowing(self, addrs: Iterable[str]) -> tuple[str, ...]:
        """Return those that this node dials, also through relays."""
        return tuple(addr for addr in dialable(addrs) if is_relayed(addr) or self.takes(addr))


def to_announce(direct: Iterable[str], relayed: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses that others are told: public ones, those through relays, private ones, loopback last."""
    ranked = sorted(dialable((*direct, *relayed)), key=lambda addr: (is_loopback(addr), _rank(addr)))
    return tuple(dict.fromkeys(ranked))[: limits.MAX_CONTACT_ADDRS]


def _rank(addr: str) -> int:
    return 1 if is_relayed(addr) else 2 if is_private(addr) else 0


def _subnet(addr: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    ip = ip_of(addr)
    return None if ip is None else ipaddress.ip_network((ip, _SUBNET_BITS[ip.version]), strict=False)
