"""The addresses of peers that a node keeps, and those of its own that it sends to others."""

from __future__ import annotations

import pytest
from swarm.network.dht import routing_table
from swarm.network.dht.routing_table import AddressBook
from swarm_protocol.identity import Identity

RELAY = Identity(bytes(32)).peer_id
CIRCUIT = f"/ip4/192.0.2.8/tcp/4001/p2p/{RELAY}/p2p-circuit"
A, B, C = (Identity(bytes([number]) * 32).peer_id for number in (1, 2, 3))
NEAR, FAR = "/ip4/127.0.0.1/tcp/4001", "/ip4/192.0.2.7/tcp/4001"


def test_book_keeps_the_last_addresses_of_a_peer_that_can_be_dialled() -> None:
    book = AddressBook()
    book.learn(A, (NEAR, CIRCUIT, "/unix/tmp/x", "/ip4/1.2.3/tcp/1", f"{FAR}/p2p/{RELAY}", "/ip4/192.0.2.7/tcp/99999"))
    assert book.of(A) == (NEAR, CIRCUIT)
    book.learn(A, ("/nothing",))
    assert book.of(A) == (NEAR, CIRCUIT)
    book.learn(A, (FAR,))
    assert book.of(A) == (FAR,)
    assert book.of(B) == ()


def test_full_book_drops_the_peer_with_the_oldest_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_table, "MAX_ADDRESSED", 2)
    book = AddressBook()
    for peer_id in (A, B, A, C):
        book.learn(peer_id, (FAR,))
    assert [book.of(peer_id) for peer_id in (A, B, C)] == [(FAR,), (), (FAR,)]


def test_book_drops_a_peer_that_was_gone_twice() -> None:
    book = AddressBook()
    for peer_id in (A, B, C):
        book.learn(peer_id, (FAR,))
    book.forget_all_but((A, B))
    assert book.of(C) == (FAR,)  # it may come back
    book.forget_all_but((A, C))
    book.forget_all_but((A, C))
    assert [book.of(peer_id) for peer_id in (A, B, C)] == [(FAR,), (), (FAR,)]
    assert len(book) == 2
