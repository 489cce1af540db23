"""Tells the kind of an IP address and the network around it, for all addresses that are dialled or announced.

Pure. Sources: RFC 1918, 4193, 6598 and 2544 for private networks, RFC 3927 and 4291 for link-local ones, RFC 6890 for
addresses that name no host. Documentation addresses count as public: nothing is there.
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
        "unusable": _networks("0.0.0.0/8", "192.0.0.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        "public": _networks("0.0.0.0/0"),
    },
    6: {
        "loopback": _networks("::1/128"),
        "link-local": _networks("fe80::/10"),
        "private": _networks("fc00::/7"),
        # Teredo and 6to4: tunnels to an IPv4 address that stands in the address
        "unusable": _networks("2001::/32", "2002::/16"),
        "public": _networks("2000::/3"),
    },
}
"""By IP version; the first kind that has the address counts. What is in no network of the table is unusable."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def ip4_inside(ip: IpAddress) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 one is another way to write: mapped (RFC 4291) or for a NAT64 (RFC 6052)."""
    if isinstance(ip, ipaddress.IPv4Address):
        return None
    return ipaddress.IPv4Address(ip.packed[-4:]) if ip in _NAT64 else ip.ipv4_mapped


@lru_cache(maxsize=4096)
def kind_of(ip: IpAddress) -> IpKind:
    """Return who can use an address. "unusable" are those that name no host, or that nobody uses any more."""
    ip = ip4_inside(ip) or ip
    for kind, networks in _KINDS[ip.version].items():
        if any(ip in network for network in networks):
            return kind
    return "unusable"


def local_network_of(ip: IpAddress) -> IpNetwork:
    """Return the local network around an address whose mask is unknown: as large as home routers make it."""
    return _network_of(ip, 24 if ip.version == 4 else 64)


def provider_network_of(ip: IpAddress) -> IpNetwork:
    """Return the network around a public address that one provider has as a rule."""
    return _network_of(ip, 16 if ip.version == 4 else 32)


@lru_cache(maxsize=4096)
def _network_of(ip: IpAddress, num_bits: int) -> IpNetwork:
    return ipaddress.ip_network((ip, num_bits), strict=False)
