"""Chooses the addresses that a node listens on from the peers that it joins through. Looks at this machine's addresses,
and at nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from swarm.network.discovery.dns_lookup import is_localhost
from swarm.network.discovery.peer_names import is_named
from swarm.network.libp2p.path_watch import has_public_ip6
from swarm.network.multiaddr import ip_of, is_loopback

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ALL_IP4, ALL_IP6 = ("/ip4/0.0.0.0/tcp/0",), ("/ip6/::/tcp/0",)
"""All interfaces, at any free port."""


def listen_addrs_for(peers: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses to listen on for a node that joins through `peers`: loopback if all are on this machine.
    They are in the form that `peer_names.check_peer` gives them.

    With a peer beyond it these are all interfaces, at any free port: a node that listens on loopback alone can be
    reached from other machines through relays only. IPv6 is among them where this machine has a public address of it,
    or a peer's address shows it.
    """
    beyond = [addr for addr in peers if not _is_on_this_machine(addr)]
    if not beyond:
        return LOOPBACK
    has_ip6 = has_public_ip6() or any(ip is not None and ip.version == 6 for ip in map(ip_of, beyond))
    return (*ALL_IP4, *(ALL_IP6 if has_ip6 else ()))


def _is_on_this_machine(addr: str) -> bool:
    return is_loopback(addr) or (is_named(addr) and is_localhost(addr.split("/")[2]))
