"""Peers share a server's sequences and pages: a peer may take all that no other asks for, and its equal share while
others wait."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from swarm.serving.peer_shares import KEPT_S, REST_S, RETRY_AFTER_S, WAIT_S, PeerShares
from swarm_protocol.errors import PeerRefused

ROOM = 100


@dataclass
class Sequence:
    client: str
    num_pages: int


class Server:
    """A server with eight sequences and ROOM pages."""

    def __init__(self) -> None:
        self.held: list[Sequence] = []
        self.shares = PeerShares(self.held, 8, ROOM)
        self.now_s = 0.0

    def open(self, client: str, num_pages: int = 1) -> None:
        self.shares.check(client, num_pages, now_s=self.now_s)
        if len(self.held) >= 8 or num_pages + sum(sequence.num_pages for sequence in self.held) > ROOM:
            raise self.shares.refused(client, num_pages, now_s=self.now_s, num_more=1)
        self.held.append(Sequence(client, num_pages))
        self.shares.admitted(client, num_pages, now_s=self.now_s)

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


def test_shares_let_a_peer_take_what_no_other_asks_for() -> None:
    """A gateway has many users, and one visitor with one session must not cost them half of the server."""
    server = Server()
    server.open("b")
    for _ in range(7):
        server.open("a")
    with pytest.raises(PeerRefused, match="the server is full: all 8 sessions are open"):
        server.open("a")


def test_shares_keep_places_for_peers_that_hold_none() -> None:
    held = [Sequence("a", 1)] * 30
    shares = PeerShares(held, 32, num_kept=2)
    assert (shares.places_for("a"), shares.places_for("b")) == (30, 32)
    with pytest.raises(PeerRefused, match="all 32 sessions are open, but for 2 for peers without any"):
        raise shares.refused("a", 1, now_s=0.0, num_more=1)
    held.append(Sequence("b", 1))
    shares.check("b", 1, now_s=0.0)  # a does not wait: it has all that it may have


def test_shares_keep_room_for_a_large_session_also_while_those_that_grow_are_refused() -> None:
    shares = PeerShares([Sequence("gateway", 60)], 8, ROOM)
    for at_s in range(0, 2 * int(WAIT_S), 2):
        shares.refused("gateway", 1, now_s=float(at_s))
        shares.refused("gateway", 50, now_s=at_s + 1.0, num_more=1)
    with pytest.raises(PeerRefused, match="its cache has no room for 5 more pages"):
        shares.check_turn("gateway", 5, num_free=40, now_s=2 * WAIT_S)
    shares.check_turn("gateway", 50, num_free=50, now_s=2 * WAIT_S)


def test_shares_keep_room_for_a_quarter_of_the_time_for_a_peer_that_always_asks_for_too_much() -> None:
    shares, num_kept, minutes = PeerShares([Sequence("gateway", 60)], 8, ROOM), 0, 10
    for at_s in range(60 * minutes):
        if not at_s % RETRY_AFTER_S:
            shares.refused("stranger", 50 + at_s // 60, now_s=float(at_s), num_more=1)
        try:
            shares.check_turn("gateway", 5, num_free=40, now_s=at_s + 0.5)
        except PeerRefused:
            num_kept += 1
    assert KEPT_S <= num_kept <= 60 * minutes * KEPT_S / (KEPT_S + REST_S) + KEPT_S


def test_shares_give_a_freed_place_to_a_peer_that_waits() -> None:
    server = Server()
    for _ in range(8):
        server.open("a")
    for number, peer in enumerate(("b", "c", "d")):
        server.refuses(peer)
        server.close_one("a")
        with pytest.raises(PeerRefused, match=f"your {7 - number} sessions already use the share of one peer"):
            server.open("a")
        server.open(peer)
    assert [sequence.client for sequence in server.held] == [*"aaaaabcd"]
    server.refuses("b")  # it has less than a quarter, so it waits
    server.close_one("a")
    server.refuses("a")
    server.open("b")
    server.refuses("b")  # it has a quarter, so nobody waits
    server.close_one("c")
    server.open("a")


def test_shares_are_equal_while_two_peers_want_everything() -> None:
    server = Server()
    for _ in range(8):
        server.open("a")
    for _ in range(4):
        server.refuses("b")
        server.close_one("a")
        server.refuses("a")
        server.open("b")
    for peer in "abab":  # each has its half: whoever asks first gets what is freed
        server.refuses(peer)
        server.close_one(peer)
        server.open(peer)


def test_shares_admit_each_of_many_peers_though_two_others_hold_half_each() -> None:
    server = Server()
    for peer in "aaaabbbb":
        server.open(peer)
    for number in range(6):
        server.refuses(f"c{number}")
    for number in range(6):
        server.close_one("ab"[number % 2])
        server.refuses("a")
        server.refuses("b")
        server.open(f"c{number}")


def test_shares_leave_a_peer_half_however_many_others_only_ask() -> None:
    """They ask for more than is free, again and again, and hold nothing."""
    server = Server()
    for _ in range(8):
        server.open("a", 2)
    for number in range(100):
        server.refuses(f"b{number}", 99)
    for _ in range(4):
        server.close_one("a")
        server.refuses("a", 2)
    server.close_one("a")
    server.open("a", 2)


def test_shares_give_a_peer_an_equal_part_of_the_pages_or_one_sequence_of_any_size_while_another_waits() -> None:
    server = Server()
    server.open("a", 60)
    server.open("a", 20)
    server.refuses("b", 30)
    server.refuses("a", 1)
    server.open("c", 20)
    server.close_one("a")
    server.refuses("a", 14)  # a third for each peer that has sessions, and one for those that wait
    server.open("a", 13)
    server.open("b", 47)


def test_shares_let_a_session_grow_beyond_half_of_the_pages_unless_another_peer_waits() -> None:
    server = Server()
    server.open("a", 40)
    server.open("b", 10)
    server.shares.check_growth("a", 50, now_s=server.now_s)
    server.refuses("c", 60)
    server.shares.check_growth("a", 10, now_s=server.now_s)
    server.shares.check_growth("b", 40, now_s=server.now_s)
    with pytest.raises(PeerRefused, match="other peers are waiting"):
        server.shares.check_growth("a", 11, now_s=server.now_s)
    server.now_s += WAIT_S
    server.shares.check_growth("a", 11, now_s=server.now_s)


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
    server.open("a")  # no peer waits any more
    server.refuses("b")
    server.now_s += WAIT_S
    server.close_one("a")
    server.open("a")  # nor this one, which has not asked again


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
