"""Peers share a server's sequences and pages: a peer alone may take all, and half while others ask."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from swarm.serving.peer_shares import RETRY_AFTER_S, WAIT_S, PeerShares
from swarm_protocol.errors import PeerRefused

ROOM = 100


@dataclass
class Sequence:
    client: str
    num_pages: int


class Server:
    """A server with eight sequences and ROOM pages."""

    def __init__(self) -> None:
        self.shares = PeerShares(8, ROOM)
        self.held: list[Sequence] = []
        self.now_s = 0.0

    def open(self, client: str, num_pages: int = 1) -> None:
        self.shares.check(client, num_pages, self.held, now_s=self.now_s)
        if len(self.held) >= 8 or num_pages + sum(sequence.num_pages for sequence in self.held) > ROOM:
            raise self.shares.refused(client, num_pages, self.held, now_s=self.now_s, num_more=1)
        self.held.append(Sequence(client, num_pages))

    def refuses(self, client: str, num_pages: int = 1) -> None:
        with pytest.raises(PeerRefused) as refused:
            self.open(client, num_pages)
        assert refused.value.retry_after_s == RETRY_AFTER_S

    def close_one(self, client: str) -> None:
        self.held.remove(next(sequence for sequence in self.held if sequence.client == client))


def test_shares_let_a_peer_take_all_when_it_is_alone() -> None:
    server = Server()
    for _ in range(8):
        server.open("a", 12)
    server.refuses("a")


def test_shares_give_a_peer_half_of_the_sequences_when_another_asks() -> None:
    server = Server()
    server.open("b")
    for _ in range(4):
        server.open("a")
    server.refuses("a")
    for _ in range(3):
        server.open("b")
    with pytest.raises(PeerRefused, match="the server is full: all 8 sessions are open"):
        server.open("c")


def test_shares_give_a_peer_half_of_the_pages_or_one_sequence_of_any_size_when_another_asks() -> None:
    server = Server()
    server.open("b", 10)
    server.open("a", 30)
    server.refuses("a", 21)
    server.open("a", 20)
    server.refuses("a", 1)
    server.close_one("b")
    server.open("c", 50)
    server.close_one("c")
    server.close_one("a")
    server.close_one("a")
    server.open("c", 1)
    server.open("a", 99)


def test_shares_let_a_session_grow_beyond_half_of_the_pages_unless_another_peer_waits() -> None:
    server = Server()
    server.open("a", 40)
    server.open("b", 10)
    server.shares.check_growth("a", 50, server.held, now_s=server.now_s)
    server.refuses("c", 60)
    server.shares.check_growth("a", 10, server.held, now_s=server.now_s)
    server.shares.check_growth("b", 40, server.held, now_s=server.now_s)
    with pytest.raises(PeerRefused, match="other peers are waiting"):
        server.shares.check_growth("a", 11, server.held, now_s=server.now_s)
    server.now_s += WAIT_S
    server.shares.check_growth("a", 11, server.held, now_s=server.now_s)


def test_shares_admit_a_refused_peer_first_when_room_is_freed() -> None:
    server = Server()
    for _ in range(8):
        server.open("a")
    server.refuses("b")
    server.now_s += RETRY_AFTER_S
    server.close_one("a")
    server.refuses("a")
    server.open("b")
    server.close_one("b")
    server.now_s += WAIT_S
    server.open("a")  # no peer waits any more


def test_shares_do_not_limit_a_peer_for_its_own_refusals() -> None:
    server = Server()
    server.open("b", ROOM)
    server.refuses("a")
    server.close_one("b")
    for _ in range(8):
        server.open("a")
    server.refuses("a")
    server.close_one("a")
    server.open("a")


def test_shares_refuse_for_good_what_exceeds_the_server() -> None:
    with pytest.raises(PeerRefused) as refused:
        Server().open("a", ROOM + 1)
    assert refused.value.retry_after_s == 0
