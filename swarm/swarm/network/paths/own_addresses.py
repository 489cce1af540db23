"""Knows at which addresses others reach this node, and so which ones it announces, and whether it needs relays.

`address_survey` asks peers, and sets what they answer here. State belongs to the network's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from swarm_protocol.records import Reachability

from swarm.network.discovery.own_networks import source_addresses
from swarm.network.libp2p.host import Host
from swarm.network.multiaddr import ip_of, is_loopback, is_private, is_tcp_by_ip, tcp_endpoint
from swarm.network.paths.dial_policy import to_announce
from swarm.network.paths.opener import ListenEndpoint


class OwnAddresses:
    """Knows which of this node's addresses others can dial."""

    def __init__(
        self,
        host: Host,
        *,
        announced: Sequence[str],
        listen_endpoints: Mapping[int, ListenEndpoint],
        relayed: Callable[[], Sequence[str]],
    ) -> None:
        """`announced` are addresses that the operator gives. Since peers look no names up, the addresses at which peers
        reach this node are announced besides names. `relayed` returns the addresses through relays."""
        self.daemons: tuple[str, ...] = ()
        """The daemon's own addresses."""
        self.seen_at: tuple[str, ...] = ()
        """The addresses at which peers agree that they see this node."""
        self.confirmed: tuple[str, ...] = ()
        """The candidates that peers have reached."""
        self.was_asked = False
        """True once any peer has tried to reach this node."""
        self.is_behind_symmetric_nat = False
        """True once peers have shown that a NAT gives this node another port for each peer."""
        self.listen_endpoints = listen_endpoints
        self._host = host
        self._announced = tuple(announced)
        self._named_ports = [endpoint[1] for addr in announced if not ip_of(addr) and (endpoint := tcp_endpoint(addr))]
        self._first_version = min(listen_endpoints, default=4)
        self._relayed = relayed

    async def refresh(self) -> None:
        """Ask the daemon for its addresses. Raises PeerUnreachable if the daemon cannot be asked."""
        self.daemons = await self._host.addrs()

    @property
    def direct(self) -> tuple[str, ...]:
        """The addresses at which others may reach this node without a relay, without /p2p."""
        is_local = all(map(is_loopback, self.daemons)) or any(map(is_loopback, self.seen_at))
        first = of_version(self._first_version, self.daemons)
        own = [
            addr
            for addr in self.daemons
            if (is_local or not is_loopback(addr)) and (is_private(addr) or (addr in first and not self.was_asked))
        ]
        return tuple(dict.fromkeys((*self._announced, *self.confirmed, *own)))

    @property
    def possible(self) -> tuple[str, ...]:
        """The addresses at which a peer may reach this node while this node opens its NAT or firewall for the peer: the
        direct ones, those at which peers see this node, and its own IPv6 addresses."""
        return tuple(dict.fromkeys((*self.direct, *self.seen_at, *self._own_ip6())))

    @property
    def can_be_opened(self) -> bool:
        """Return whether this node can open a NAT or firewall for a peer: no NAT gives it another port for each peer,
        or it has a public IPv6 address."""
        return not self.is_behind_symmetric_nat or bool(self._own_ip6())

    def _own_ip6(self) -> list[str]:
        """Return the daemon's public IPv6 addresses from which this machine's connections come."""
        sources = source_addresses()
        return [addr for addr in of_version(6, self.daemons) if str(ip_of(addr)) in sources and not is_private(addr)]

    @property
    def reachability(self) -> Reachability:
        """Return how others reach this node."""
        return "public" if self._open else "relay" if self._relayed() else "unknown"

    @property
    def is_open(self) -> bool:
        """Return whether peers have confirmed an address that does not depend on a NAT's temporary mapping. It must be
        an IPv4 address, which all peers can use, unless this node listens on IPv6 alone."""
        return bool(of_version(self._first_version, list(filter(self._is_lasting, self._open))))

    @property
    def _open(self) -> list[str]:
        """The confirmed addresses. A neighbour confirms private ones, which count only while this node knows no peers
        beyond: behind a NAT, a neighbour can be the only peer that is connected by IPv4."""
        seen = chain.from_iterable(self._host.connected.values())
        is_beyond = any(ip_of(addr) and not is_private(addr) for addr in seen)
        return [addr for addr in self.confirmed if not (is_beyond and is_private(addr))]

    @property
    def needs_relays(self) -> bool:
        """Return whether some peers can reach this node only through a relay: all of them, or those with IPv4 alone."""
        return not self.is_open or self._first_version != 4

    def to_announce(self) -> tuple[str, ...]:
        """Return the addresses to announce, direct and relayed ones."""
        return to_announce(self.direct, self._relayed())

    def candidates(self) -> list[str]:
        """Return addresses at which others may reach this node, the likeliest first: the daemon's own ones, and the
        listen port at the IP that peers see. None without a listener."""
        if not self.listen_endpoints:
            return []
        if announced := [addr for addr in self._announced if ip_of(addr)]:
            return [addr for addr in announced if not is_loopback(addr)]
        ips = {ip_of(addr): addr for addr in self.seen_at}
        own = [addr for addr in self.daemons if is_tcp_by_ip(addr) and ip_of(addr) in ips]
        forwarded = [
            f"/ip{ip.version}/{ip}/tcp/{port}"
            for ip in ips
            if ip is not None and ip.version in self.listen_endpoints
            for port in (*self._named_ports, self.listen_endpoints[ip.version].bind[1])
        ]
        found = dict.fromkeys((*own, *forwarded, *ips.values()))
        return [addr for addr in found if not is_loopback(addr)]

    def _is_lasting(self, addr: str) -> bool:
        """Return whether an address does not depend on a NAT's temporary mapping: it is one of the daemon's, or the
        operator announced it, or its port with a name."""
        endpoint = tcp_endpoint(addr)
        return addr in (*self._announced, *self.daemons) or (endpoint is not None and endpoint[1] in self._named_ports)


def of_version(version: int, addrs: Sequence[str]) -> tuple[str, ...]:
    """Return those of `addrs` that have an IP address of this version."""
    return tuple(addr for addr in addrs if (ip := ip_of(addr)) is not None and ip.version == version)
