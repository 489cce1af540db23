"""The networks of this machine, which bound what a name or a local peer may make a node dial.

Others decide where a name leads, and what a multicast answer says. If a node dialled everything, they could use it to
probe the services of its own machine and local network. So both are checked against the networks of the node's machine.
Pure, except for `own_subnets`, `source_addresses` and `has_public_ip6`, which ask the machine.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.network.ip_kinds import IpAddress, IpKind, IpNetwork, kind_of
from swarm.network.multiaddr import is_loopback

IP6_PREFIX = 64
"""Prefix length of an IPv6 network on a link, whatever prefix the interface has (RFC 4291, section 2.5.4)."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subnet:
    """One address of an interface of this machine, and the network around it. An interface that is removed and added
    again has another `index`, so that a link is opened again: the old sockets do not reach it."""

    interface: str
    address: IpAddress
    network: IpNetwork
    index: int = 0


def kinds_to_dial(listen: Sequence[str], own: Iterable[IpAddress]) -> frozenset[IpKind]:
    """Return the kinds of address to which a name may lead a node.

    `listen` are the node's listen addresses, `own` the addresses of its machine. Public addresses are always allowed.
    Private and link-local ones are allowed only if the machine has an address of that kind. It is then in such a
    network, as in a home, a company or a cluster, and names of that network rightly lead there. (Link-local addresses
    of IPv6 do not count: every machine with IPv6 has them, and they cannot be dialled without a zone.) Loopback
    addresses are allowed only if the node listens on loopback alone, so that its network may be this machine.
    """
    kinds: set[IpKind] = {"public"}
    for address in own:
        kind = kind_of(address)
        if kind == "private" or (kind == "link-local" and address.version == 4):
            kinds.add(kind)
    if all(map(is_loopback, listen)):
        kinds.add("loopback")
    return frozenset(kinds)


def own_subnets() -> tuple[Subnet, ...]:
    """Return the subnets of this machine's interfaces that are up, including loopback ones."""
    import psutil  # noqa: PLC0415 - only for names and local networks

    try:
        states, interfaces = psutil.net_if_stats(), psutil.net_if_addrs()
    except (OSError, psutil.Error) as error:  # as in a sandbox
        logger.info("cannot see this machine's network interfaces: %s", error)
        return ()
    found = []
    for interface, addresses in interfaces.items():
        if interface in states and not states[interface].isup:
            continue
        for each in addresses:
            subnet = _subnet(interface, each.address, each.netmask)
            if subnet is not None:
                found.append(subnet)
    return tuple(found)


def _subnet(interface: str, address: str, netmask: str | None) -> Subnet | None:
    """Return the subnet of an interface's address; None for a hardware address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
        prefix = IP6_PREFIX if ip.version == 6 else netmask or "255.255.255.255"
        network = ipaddress.ip_network(f"{ip}/{prefix}", strict=False)
    except ValueError:
        return None
    try:
        index = socket.if_nametoindex(interface)
    except OSError:  # the interface was just removed, or has no number
        index = 0
    return Subnet(interface=interface, address=ip, network=network, index=index)


def source_addresses() -> tuple[str, ...]:
    """Return the addresses from which this machine's connections to the internet come now. Nothing is sent."""
    return tuple(filter(None, (_source(socket.AF_INET, "192.88.99.1"), _source(socket.AF_INET6, "2001:db8::1"))))


def has_public_ip6() -> bool:
    """Return whether this machine's connections to the internet come from a public IPv6 address."""
    return any(kind_of(ip) == "public" for ip in map(ipaddress.ip_address, source_addresses()) if ip.version == 6)


def _source(family: socket.AddressFamily, destination: str) -> str:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((destination, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no such network
        return ""
