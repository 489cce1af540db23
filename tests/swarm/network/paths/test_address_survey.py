"""Conclusions from the observations of peers, one of which may lie."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

import pytest
from swarm.network.paths.address_survey import (
    are_decided,
    choose_observers,
    reached_addrs,
    seen_addrs,
    shows_symmetric_nat,
)

NAT, OTHER = "/ip4/44.0.0.1/tcp/4001", "/ip6/2a00::1/tcp/4001"
PORTS = [f"/ip4/44.0.0.1/tcp/{port}" for port in (51001, 51002, 51003, 51004)]
VICTIM = "/ip4/44.9.9.9/tcp/4001"


@pytest.mark.parametrize(
    ("seen", "is_symmetric"),
    [
        ([], False),
        ([[PORTS[0]]], False),
        ([[PORTS[0]], [PORTS[1]]], False),  # one of the two may lie
        ([[PORTS[0]], [PORTS[1]], [PORTS[2]]], True),
        ([[NAT], [NAT], [PORTS[0]]], False),
        ([[NAT], [NAT], PORTS], False),
        ([[PORTS[0]], PORTS[1:]], False),  # a peer that names many ports counts once
        ([[PORTS[0]], [PORTS[1]], [VICTIM]], False),
        ([[PORTS[0], OTHER], [PORTS[1], OTHER], [PORTS[2], OTHER]], True),
        ([[NAT], [NAT], [PORTS[0]], [PORTS[1]]], False),
    ],
)
def test_nat_is_symmetric_when_three_peers_see_different_ports(
    seen: Sequence[Sequence[str]], is_symmetric: bool
) -> None:
    assert shows_symmetric_nat(seen) is is_symmetric


@pytest.mark.parametrize(
    ("seen", "counting"),
    [
        ([], ()),
        ([[NAT, OTHER]], (NAT, OTHER)),
        ([[NAT], [VICTIM]], ()),
        ([[NAT], [VICTIM, VICTIM.replace("4001", "4002")], [PORTS[0]]], (NAT, PORTS[0])),
    ],
)
def test_ip_counts_when_two_peers_or_the_only_peer_name_it(
    seen: Sequence[Sequence[str]], counting: tuple[str, ...]
) -> None:
    assert seen_addrs(seen) == counting


@pytest.mark.parametrize(
    ("answers", "is_decided", "found"),
    [
        ([], False, ()),
        ([[NAT]], False, (NAT,)),
        ([[NAT], []], False, ()),
        ([[NAT], [], [NAT]], True, (NAT,)),
        ([[NAT], [], []], True, ()),
        ([[NAT, NAT], []], False, ()),
        ([[NAT, OTHER], [NAT]], True, (NAT,)),
    ],
)
def test_address_is_reachable_when_two_peers_confirm_it_and_more_are_asked_after_one_denial(
    answers: Sequence[Sequence[str]], is_decided: bool, found: tuple[str, ...]
) -> None:
    assert are_decided(answers) is is_decided
    assert reached_addrs(answers, (NAT, OTHER)) == found


def test_observers_are_from_different_networks_and_one_from_each_machine() -> None:
    ips = ["44.1.0.1", "44.1.0.1", "44.1.0.2", "44.2.0.1", "2a00:1::1", "2a00:1::2", "2a00:1:2::1", "10.0.0.1"]
    peers = {f"p{number}": ip_address(ip) for number, ip in enumerate(ips)}
    assert choose_observers(peers, 10) == ["p0", "p3", "p4", "p7", "p2", "p6"]
    assert choose_observers(peers, 2) == ["p0", "p3"]
