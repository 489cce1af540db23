"""The kind of each IP address, and its network."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from swarm.network.ip_kinds import IpKind, kind_of, local_network_of, provider_network_of


@pytest.mark.parametrize(
    ("kind", "ips"),
    [
        ("public", ("44.1.1.1", "172.32.0.1", "198.51.100.7", "223.255.255.255", "2001:4860::1", "2a00::1", "3fff::1")),
        ("private", ("10.0.0.1", "172.16.0.1", "192.168.255.1", "100.64.0.1", "198.18.0.1", "fc00::1", "fdff::1")),
        ("link-local", ("169.254.169.254", "fe80::1", "fe80::1%eth0", "febf::1")),
        ("loopback", ("127.0.0.1", "127.255.0.1", "::1")),
        ("unusable", ("0.0.0.0", "0.0.0.1", "192.0.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255")),
        ("unusable", ("168.63.129.16",)),
        ("public", ("168.63.129.15", "168.63.129.17")),
        ("unusable", ("::", "::2", "::10.0.0.1", "100::1", "2001::1", "2002:a00:1::", "4000::1", "fec0::1", "ff02::1")),
    ],
)
def test_each_address_has_one_kind(kind: IpKind, ips: tuple[str, ...]) -> None:
    assert {ip: kind_of(ip_address(ip)) for ip in ips} == dict.fromkeys(ips, kind)


@pytest.mark.parametrize("ip", ["44.1.1.1", "10.0.0.1", "169.254.1.1", "127.0.0.1", "0.0.0.0", "224.0.0.1"])
def test_ipv4_address_inside_an_ipv6_one_keeps_its_kind(ip: str) -> None:
    mapped, translated = ip_address(f"::ffff:{ip}"), ip_address(int(ip_address("64:ff9b::")) + int(ip_address(ip)))
    assert kind_of(mapped) == kind_of(translated) == kind_of(ip_address(ip))


def test_networks_have_the_usual_sizes_of_homes_and_providers() -> None:
    ip4, ip6 = ip_address("44.10.20.30"), ip_address("2a00:1450:1:2:3::4")
    assert [str(local_network_of(each)) for each in (ip4, ip6)] == ["44.10.20.0/24", "2a00:1450:1:2::/64"]
    assert [str(provider_network_of(each)) for each in (ip4, ip6)] == ["44.10.0.0/16", "2a00:1450::/32"]
