"""Classifies IP addresses that are dialled or announced, and finds the network around an address.

Pure. Sources: RFC 1918, 4193, 6598 and 2544 for private networks, RFC 3927 and 4291 for link-local ones, RFC 6890 for
addresses that name no host. Documentation addresses count as public, since no host has one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, TypeAlias

IpKind: TypeAlias = Literal["public", "private", "link-local", "loopback", "unusable"]
IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def _networks(*texts: str) -> tuple[IpNetwork, ...]:
    return tuple(map(ipaddress.ip_network, texts))


_KINDS: Mapping[int, Mapping[IpKind, tuple[IpNetwork, ...]]] = {
    4: {
        "loopback": _networks("127.0.0.0/8"),
        "link-local": _networks("169.254.0.0/16"),
        "private": _networks("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15"),
        # 168.63.129.16: a service of Azure's for its virtual machines, at a public address
        "unusable": _networks("0.0.0.0/8", "192.0.0.0/24", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32"),
        "public": _networks("0.0.0.0/0"),
    },
    6: {
        "loopback": _networks("::1/128"),
        "link-local": _networks("fe80::/10"),
        "private": _networks("fc00::/7"),
        # Teredo and 6to4: tunnels to an IPv4 address that is part of the IPv6 address
        "unusable": _networks("2001::/32", "2002::/16"),
        "public": _networks("2000::/3"),
    },
}
"""Networks by IP version and kind. The first kind that contains an address counts. An address in none is unusable."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def ip4_inside(ip: IpAddress) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address embeds: mapped (RFC 4291) or for a NAT64 (RFC 6052); else None."""
    if isinstance(ip, ipaddress.IPv4Address):
        return None
    return ipaddress.IPv4Address(ip.packed[-4:]) if ip in _NAT64 else ip.ipv4_mapped


@lru_cache(maxsize=4096)
def kind_of(ip: IpAddress) -> IpKind:
    """Return the kind of an address: who can reach it. An "unusable" address names no host, or is obsolete."""
    ip = ip4_inside(ip) or ip
    for kind, networks in _KINDS[ip.version].items():
        if any(ip in network for network in networks):
            return kind
    return "unusable"


def local_network_of(ip: IpAddress) -> IpNetwork:
    """Return the local network around an address whose mask is unknown, of the size that home routers use (/24,
    /64)."""
    return _network_of(ip, 24 if ip.version == 4 else 64)


def provider_network_of(ip: IpAddress) -> IpNetwork:
    """Return the network around a public address that usually belongs to one provider (/16, /32)."""
    return _network_of(ip, 16 if ip.version == 4 else 32)


@lru_cache(maxsize=4096)
def _network_of(ip: IpAddress, num_bits: int) -> IpNetwork:
    return ipaddress.ip_network((ip, num_bits), strict=False)
