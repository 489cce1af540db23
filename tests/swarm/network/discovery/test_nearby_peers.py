"""The effect of strangers in the local network on what a node knows of other local peers."""

from __future__ import annotations

import ipaddress

from swarm.network.discovery.local_discovery import MAX_CLAIMS, MAX_PER_SOURCE, NearbyPeers
from swarm_protocol.dht_messages import Contact
from swarm_protocol.identity import Identity

PEERS = [Identity(number.to_bytes(2, "big") * 16).peer_id for number in range(1, 201)]


def contact(number: int, host: int | None = None) -> Contact:
    return Contact(peer_id=PEERS[number], addrs=(f"/ip4/10.0.0.{host or number}/tcp/4001",))


def source(number: int) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(f"10.0.0.{number}")


def test_stranger_that_names_many_peers_displaces_none_of_others() -> None:
    nearby = NearbyPeers()
    for number in range(1, 20):
        nearby.note(source(number), contact(number), 0.0)
    for number in range(20, 200):
        nearby.note(source(99), contact(number), 1.0)
    assert len(nearby) == 19 + MAX_PER_SOURCE
    assert {contact(number) for number in range(1, 20)} <= set(nearby.contacts)
    assert nearby.contacts[-1] == contact(199), "the last peers that it named must be kept"


def test_stranger_that_names_a_present_peer_does_not_change_its_addresses() -> None:
    nearby = NearbyPeers()
    nearby.note(source(1), contact(1), 0.0)
    nearby.note(source(99), contact(1, host=99), 1.0)
    assert nearby.contacts == (contact(1), contact(1, host=99))


def test_reached_peers_keep_their_place_when_others_come() -> None:
    nearby = NearbyPeers()
    for number in range(1, 4):
        nearby.note(source(number), contact(number), 0.0)
        nearby.reached(contact(number))
    for number in range(10, 200):
        nearby.note(source(number), contact(number), 1.0)
    assert len(nearby) == MAX_CLAIMS
    assert {contact(number) for number in range(1, 4)} <= set(nearby.contacts)
    for claimed in nearby.contacts:
        nearby.reached(claimed)
    nearby.note(source(250), contact(5, host=250), 2.0)
    assert contact(5, host=250) not in nearby.contacts, "no place is left"
    nearby.forget(0.0)
    assert len(nearby) == MAX_CLAIMS - 3, "a peer that sends nothing any more must be dropped, even if it was reached"


def test_each_source_has_a_turn_before_any_has_a_second_one() -> None:
    nearby = NearbyPeers()
    for number in (1, 2, 3):
        nearby.note(source(99), contact(number), 0.0)
    nearby.note(source(4), contact(4), 1.0)
    assert nearby.contacts[:2] == (contact(1), contact(4))


def test_peer_that_moves_is_known_where_it_is_now() -> None:
    nearby = NearbyPeers()
    nearby.note(source(1), contact(1), 0.0)
    nearby.note(source(1), contact(1, host=2), 1.0)
    assert nearby.contacts == (contact(1, host=2),)


def test_source_keeps_no_place_by_repeating_a_claim_that_has_become_false() -> None:
    nearby = NearbyPeers()
    for number in range(1, MAX_CLAIMS + 1):
        nearby.note(source(number), contact(200 - number), 0.0)
        nearby.reached(contact(200 - number))
        nearby.note(source(number), contact(200 - number, host=99), 1.0)
    nearby.note(source(250), contact(1), 2.0)
    assert contact(1) in nearby.contacts
