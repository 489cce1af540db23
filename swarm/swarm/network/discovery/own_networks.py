"""The networks that this machine is in: what a name or a local peer may make a node dial.

A name, or an answer by multicast, comes from others. A node that dials whatever they say could be used to knock at the
services of its own machine and local network. So both are held against the networks that the node is in itself.
Pure, but for `own_subnets` and `source_addresses`, which ask the machine.
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
"""One IPv6 network on a link, whatever prefix the interface was given (RFC 4291, section 2.5.4)."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subnet:
    """One address of an interface of this machine, and the network around it. An interface that is removed and comes
    back has another `index` then, to which the sockets of the old one do not lead."""

    interface: str
    address: IpAddress
    network: IpNetwork
    index: int = 0


def kinds_to_dial(listen: Sequence[str], own: Iterable[IpAddress]) -> frozenset[IpKind]:
    """Return the kinds of address that a name may lead a node to.

    `listen` are its listen addresses, `own` the addresses of its machine. Public ones it may always. Private and
    link-local ones only if its machine has an address of that kind: then it is in such a network, as in a home, a
    company or a cluster, and names of that network lead there rightly. (Every machine with IPv6 has link-local
    addresses of that version, which say nothing; nobody can dial one without a zone.) Loopback ones only if the node
    itself is not to be reached from beyond its machine, so that its network can be this machine alone.
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
    """Return the subnets of this machine's interfaces that are up, those of loopback addresses included."""
    import psutil  # noqa: PLC0415 - only where a name or a local network is looked at

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
    except OSError:  # it has just gone, or has no such number
        index = 0
    return Subnet(interface=interface, address=ip, network=network, index=index)


def source_addresses() -> tuple[str, ...]:
    """Return the addresses that this machine's connections to the internet have now. Nothing is sent."""
    return tuple(filter(None, (_source(socket.AF_INET, "192.88.99.1"), _source(socket.AF_INET6, "2001:db8::1"))))


def has_public_ip6() -> bool:
    """Return whether this machine's connections have an address of IPv6 that is not a private network's."""
    return any(kind_of(ip) == "public" for ip in map(ipaddress.ip_address, source_addresses()) if ip.version == 6)


def _source(family: socket.AddressFamily, destination: str) -> str:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((destination, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no such network
        return ""
