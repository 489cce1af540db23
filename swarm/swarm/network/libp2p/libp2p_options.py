"""The options of a node's libp2p network, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import ConfigError
from swarm_protocol.network_invitation import NetworkInvitation, owner_of
from swarm_protocol.version import check_network_id

from swarm.network.discovery.dns_lookup import is_localhost
from swarm.network.discovery.own_networks import has_public_ip6
from swarm.network.discovery.peer_names import check_peer, is_named
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.multiaddr import (
    PeerAddr,
    check_announce_addr,
    check_listen_addr,
    ip_of,
    is_loopback,
    parse_peer_addr,
)

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ALL_IP4, ALL_IP6 = ("/ip4/0.0.0.0/tcp/0",), ("/ip6/::/tcp/0",)
"""Any free port on all interfaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Libp2pOptions:
    """The options of one node's network.

    `peers` are nodes to join through, as /ip4/…/tcp/…/p2p/<peer id> or by name (`discovery.peer_names`). Without
    `peers`, `remembered` and `mdns`, the node is the first of its network. `mdns` finds nodes of the local network, and
    lets them find this node, if it listens beyond this machine.

    `remembered` are nodes met in earlier runs, which are tried if no node of `peers` answers at once. `may_be_first`
    lets the node start alone if nobody answers, which is an error otherwise; it meets its `peers` once they run. The
    node waits for up to `patience_s` for the machine of one of its `peers` before it dials; others can reach it then.
    `relays` are addresses of nodes that relayed for this node.

    `relay`: "serve" lets others be reached through this node, which must be reachable itself; "use" makes this node
    reachable through relays, first those of `peers` and `relays`; "none" does neither; "auto" serves once peers have
    confirmed that this node can be reached, and uses relays until then. `relay_bytes_per_s` bounds all relayed bytes.

    `invitation` makes this node a member of a private network; `revocations` is the list that the node kept. If
    `listen` is empty, no peer can connect directly. Raises ConfigError, which names the malformed part of an address.
    """

    identity_path: Path
    network_id: str
    peers: tuple[str, ...] = ()
    remembered: tuple[Contact, ...] = ()
    may_be_first: bool = False
    patience_s: float = 0.0
    relays: tuple[str, ...] = ()
    listen: tuple[str, ...] = LOOPBACK
    announce: tuple[str, ...] = ()
    relay: Literal["none", "serve", "use", "auto"] = "none"
    relay_bytes_per_s: float = math.inf
    mdns: bool = False
    invitation: NetworkInvitation | None = None
    revocations: bytes = b""

    def __post_init__(self) -> None:
        try:
            check_network_id(self.network_id)
        except ValueError as error:
            raise ConfigError(str(error), remedy="choose a short name of letters, digits, - and _") from None
        check_invitation(self.network_id, self.invitation)
        for peer in (*self.peers, *self.relays):
            check_peer(peer)
        for addr in self.listen:
            check_listen_addr(addr)
        for addr in self.announce:
            check_announce_addr(addr)
        if self.relay == "serve" and not self.listen:
            raise ConfigError("a relay must listen", remedy="give it a listen address, or do not serve as a relay")
        if self.relay == "use" and not (self.peers or self.relays):
            raise ConfigError(
                "there is no peer that could relay for this node",
                remedy="give the address of a peer that serves as a relay",
            )

    def with_addrs(
        self, given: Sequence[PeerAddr], worth_knowing: Callable[[Iterable[str]], tuple[str, ...]]
    ) -> Libp2pOptions:
        """Return these options with `peers` replaced by the addresses `given`, to which they have led. Addresses of
        remembered peers and of relays are kept only if `worth_knowing` returns them, since peers announced them."""
        remembered = tuple(replace(each, addrs=worth_knowing(each.addrs)) for each in self.remembered)
        relays = tuple(each for each in self.relays if worth_knowing([parse_peer_addr(each).addr]))
        relay = self.relay if self.relay != "use" or given or relays else "none"
        return replace(self, peers=tuple(map(str, given)), remembered=remembered, relays=relays, relay=relay)

    def for_daemon(self) -> DaemonOptions:
        return DaemonOptions(
            identity_path=self.identity_path,
            listen=self.listen,
            announce=self.announce,
            nat_port_map=self.relay == "auto" and not self.announce and not all(map(is_loopback, self.listen)),
        )


def check_invitation(network_id: str, invitation: NetworkInvitation | None) -> None:
    """Raises ConfigError if the network is private and there is no invitation, or if the invitation is to another
    one."""
    if invitation is None and owner_of(network_id) is not None:
        raise ConfigError(
            f"{network_id} is a private network", remedy="give --invite the invitation that its owner made for you"
        )
    if invitation is not None and invitation.network_id != network_id:
        raise ConfigError(
            f"the invitation is to {invitation.network_id}, not to {network_id}", remedy="leave out the network id"
        )


def listen_addrs_for(peers: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses on which a node listens that joins through `peers`: loopback if all of these are on this
    machine. `peers` have the form that `peer_names.check_peer` returns.

    If a peer is on another machine, the node listens on all interfaces, at any free port, since a node on loopback
    alone could be reached from other machines only through relays. IPv6 is included if this machine has a public IPv6
    address, or a peer has an IPv6 address.
    """
    beyond = [addr for addr in peers if not _is_on_this_machine(addr)]
    if not beyond:
        return LOOPBACK
    has_ip6 = has_public_ip6() or any(ip is not None and ip.version == 6 for ip in map(ip_of, beyond))
    return (*ALL_IP4, *(ALL_IP6 if has_ip6 else ()))


def _is_on_this_machine(addr: str) -> bool:
    return is_loopback(addr) or (is_named(addr) and is_localhost(addr.split("/")[2]))
