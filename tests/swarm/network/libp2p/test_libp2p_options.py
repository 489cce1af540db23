"""Tests of `listen_addrs_for`: loopback for peers of this machine, and all interfaces for others."""

from __future__ import annotations

import pytest
from swarm.network.libp2p import libp2p_options
from swarm.network.libp2p.libp2p_options import ALL_IP4, ALL_IP6, LOOPBACK, listen_addrs_for
from swarm_protocol.identity import Identity

ID = Identity.generate().peer_id
HERE = f"/ip4/127.0.0.1/tcp/4001/p2p/{ID}"
BEYOND = f"/ip4/203.0.113.7/tcp/4001/p2p/{ID}"
BEYOND_IP6 = f"/ip6/2600::7/tcp/4001/p2p/{ID}"


@pytest.mark.parametrize(
    ("peers", "has_ip6", "expected"),
    [
        ([], True, LOOPBACK),
        ([HERE, f"/dns4/localhost/tcp/4001/p2p/{ID}", f"/ip6/::1/tcp/4001/p2p/{ID}"], True, LOOPBACK),
        ([HERE, BEYOND], False, ALL_IP4),
        ([f"/ip4/192.168.1.7/tcp/4001/p2p/{ID}"], False, ALL_IP4),
        (["/dnsaddr/swarm.example.org"], False, ALL_IP4),
        ([BEYOND], True, ALL_IP4 + ALL_IP6),
        ([BEYOND_IP6], False, ALL_IP4 + ALL_IP6),
    ],
)
def test_listen_addrs_cover_all_interfaces_when_a_peer_is_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, peers: list[str], has_ip6: bool, expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(libp2p_options, "has_public_ip6", lambda: has_ip6)
    assert listen_addrs_for(peers) == expected
