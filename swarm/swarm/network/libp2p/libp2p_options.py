"""How a node takes part in the network: its identity, the peers it joins through, where it listens, how it relays.

Values, checked on construction. What the libp2p daemon is told follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import ConfigError
from swarm_protocol.version import check_network_id

from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.multiaddr import PeerAddr, check_announce_addr, check_listen_addr, parse_peer_addr


@dataclass(frozen=True, slots=True, kw_only=True)
class Libp2pOptions:
    """`peers`: nodes to join through, as /ip4/…/tcp/…/p2p/<peer id>; none: the first node of a network.

    `remembered`: nodes met in earlier days, tried when no node of `peers` answers at once. `may_be_first`: start alone
    if no remembered node answers and there are no `peers`; else that is an error.
    `relay`: "serve" lets nodes behind NAT be reached through this one, which must be reachable itself; "use" makes this
    node reachable through those of `peers` and `relays` that serve; "none" does neither. Without `listen` nobody can
    connect directly. Raises ConfigError, which names the part of an address that is malformed.
    """

    identity_path: Path
    network_id: str
    peers: tuple[str, ...] = ()
    remembered: tuple[Contact, ...] = ()
    may_be_first: bool = False
    relays: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    relay: Literal["none", "serve", "use"] = "none"
    nat_port_map: bool = False

    def __post_init__(self) -> None:
        try:
            check_network_id(self.network_id)
        except ValueError as error:
            raise ConfigError(str(error), remedy="choose a short name of letters, digits, - and _") from None
        for peer in (*self.peers, *self.relays):
            parse_peer_addr(peer)
        for addr in self.listen:
            check_listen_addr(addr)
        for addr in self.announce:
            check_announce_addr(addr)
        if self.relay == "serve" and not self.listen:
            raise ConfigError("a relay must listen", remedy="give it a listen address, or do not serve as a relay")
        if self.relay == "use" and not (self.peers or self.relays):
            raise ConfigError(
                "there is no peer to be relayed by", remedy="give the address of one that serves as a relay"
            )

    def seeds(self, own_peer_id: str) -> tuple[PeerAddr, ...]:
        """The `peers` but this node itself: a seed may find its own address in the list that all nodes share."""
        return tuple(addr for addr in map(parse_peer_addr, self.peers) if addr.peer_id != own_peer_id)

    def relays_used(self, own_peer_id: str) -> tuple[PeerAddr, ...]:
        """The nodes that are asked to relay for this one."""
        if self.relay != "use":
            return ()
        addrs = dict.fromkeys(map(parse_peer_addr, (*self.peers, *self.relays)))
        return tuple(addr for addr in addrs if addr.peer_id != own_peer_id)

    def for_daemon(self, own_peer_id: str) -> DaemonOptions:
        return DaemonOptions(
            identity_path=self.identity_path,
            listen=self.listen,
            # libp2p itself tells others of a relay only if the relay's address is a public one
            announce=(*self.announce, *(f"{relay}/p2p-circuit" for relay in self.relays_used(own_peer_id))),
            reachability={"none": "", "serve": "public", "use": "private"}[self.relay],
            nat_port_map=self.nat_port_map,
        )
