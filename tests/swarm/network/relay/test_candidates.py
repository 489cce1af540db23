"""The nodes that may relay for a node, their order, and which of them share a network."""

from __future__ import annotations

import pytest
from swarm.network.multiaddr import PeerAddr
from swarm.network.relay.reservations import RelayCandidate, is_public, relay_candidates
from swarm_protocol.dht_messages import Contact
from swarm_protocol.identity import Identity

PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(1, 12)]
OWN = PEERS[0]


def given(peer_id: str, addr: str) -> PeerAddr:
    return PeerAddr(peer_id=peer_id, addr=addr)


def known(peer_id: str, *addrs: str) -> Contact:
    return Contact(peer_id=peer_id, addrs=addrs)


@pytest.mark.parametrize(
    ("addr", "is_one"),
    [
        ("/ip4/44.10.20.21/tcp/4001", True),
        ("/ip6/2a00:1450:4001::1/tcp/4001", True),
        ("/ip4/192.168.1.2/tcp/4001", False),
        ("/ip4/127.0.0.1/tcp/4001", False),
        ("/ip6/fd00::1/tcp/4001", False),
        ("/dns4/attic.example.org/tcp/4001", False),
        (f"/ip4/44.10.20.21/tcp/4001/p2p/{OWN}/p2p-circuit", False),
        ("/ip4/44.10.20.400/tcp/4001", False),
        ("", False),
    ],
)
def test_is_public_is_true_of_direct_addresses_by_public_ip_alone(addr: str, is_one: bool) -> None:
    assert is_public(addr) is is_one


def test_given_relays_come_first_in_order_and_each_once_with_its_best_addresses() -> None:
    addrs = ["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1", "/ip4/44.1.0.1/tcp/1"]
    found = relay_candidates(
        OWN,
        [*(given(PEERS[2], addr) for addr in addrs), given(PEERS[1], "/dns4/seed.example.org/tcp/1")],
        [known(PEERS[3], "/ip4/44.2.0.1/tcp/1"), known(PEERS[2], "/ip4/44.3.0.1/tcp/1")],
    )
    assert [(each.peer_id, each.is_given) for each in found] == [(PEERS[2], True), (PEERS[1], True), (PEERS[3], False)]
    assert found[0].addrs == ("/ip4/44.1.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1")


def test_relay_is_used_by_both_versions_of_ip() -> None:
    ip4, ip6 = [f"/ip4/44.1.0.{number}/tcp/1" for number in (1, 2)], "/ip6/2a00:1450:1::1/tcp/1"
    (found,) = relay_candidates(OWN, [], [known(PEERS[1], *ip4, ip6)])
    assert found.addrs == (ip4[0], ip6)
    assert found.networks == {"44.1.0.0/16", "2a00:1450::/32"}


def test_neither_this_node_nor_an_address_behind_a_relay_is_a_candidate() -> None:
    relayed = f"/ip4/44.1.0.1/tcp/1/p2p/{PEERS[5]}/p2p-circuit"
    found = relay_candidates(
        OWN,
        [given(OWN, "/ip4/44.1.0.1/tcp/1"), given(PEERS[1], relayed)],
        [known(OWN, "/ip4/44.1.0.1/tcp/1"), known(PEERS[2], relayed), known(PEERS[3], "/ip4/10.0.0.1/tcp/1")],
    )
    assert found == []


def test_nodes_ask_known_peers_in_different_orders() -> None:
    contacts = [known(peer_id, "/ip4/44.1.0.1/tcp/1") for peer_id in PEERS]

    def first_of(own: str) -> str:
        return relay_candidates(own, [], contacts)[0].peer_id

    assert first_of(OWN) == first_of(OWN)
    assert len({first_of(own) for own in PEERS}) > len(PEERS) // 2


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ("/ip4/44.10.20.21/tcp/1", "/ip4/44.10.99.1/tcp/2", True),
        ("/ip4/44.10.20.21/tcp/1", "/ip4/44.11.20.21/tcp/1", False),
        ("/ip6/2a00:1450:1::1/tcp/1", "/ip6/2a00:1450:2::1/tcp/1", True),
        ("/ip6/2a00:1450::1/tcp/1", "/ip6/2a00:1451::1/tcp/1", False),
        ("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2", False),
        ("/ip4/192.168.1.2/tcp/1", "/ip4/192.168.1.3/tcp/1", False),
        ("/dns4/a.example.org/tcp/1", "/dns4/a.example.org/tcp/2", False),
    ],
)
def test_relays_share_a_network_by_their_public_addresses(one: str, other: str, share: bool) -> None:
    both = [
        RelayCandidate(peer_id=peer_id, addrs=(addr,), is_given=True)
        for peer_id, addr in zip(PEERS, (one, other), strict=False)
    ]
    assert bool(both[0].networks & both[1].networks) is share
