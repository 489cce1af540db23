"""Who may take how much of a server, alone and beside others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from swarm.serving.engine.sequence_admission import RETRY_AFTER_S, WAIT_S, Admission
from swarm_protocol.errors import PeerRefused

ROOM = 100


@dataclass
class Seat:
    client: str
    num_pages: int


class Server:
    """Eight seats and ROOM pages."""

    def __init__(self) -> None:
        self.admission = Admission(8, ROOM)
        self.held: list[Seat] = []
        self.now_s = 0.0

    def open(self, client: str, num_pages: int = 1) -> None:
        self.admission.check(client, num_pages, self.held, now_s=self.now_s)
        if len(self.held) >= 8 or num_pages + sum(seat.num_pages for seat in self.held) > ROOM:
            raise self.admission.refused(client, num_pages, self.held, now_s=self.now_s)
        self.held.append(Seat(client, num_pages))

    def refuses(self, client: str, num_pages: int = 1) -> None:
        with pytest.raises(PeerRefused) as refused:
            self.open(client, num_pages)
        assert refused.value.retry_after_s == RETRY_AFTER_S

    def close_one(self, client: str) -> None:
        self.held.remove(next(seat for seat in self.held if seat.client == client))


def test_admission_alone_a_peer_may_take_all() -> None:
    server = Server()
    for _ in range(8):
        server.open("a", 12)
    server.refuses("a")


def test_admission_beside_another_a_peer_gets_half_of_the_seats() -> None:
    server = Server()
    server.open("b")
    for _ in range(4):
        server.open("a")
    server.refuses("a")
    for _ in range(3):
        server.open("b")
    server.refuses("c")  # full


def test_admission_beside_another_a_peer_gets_half_of_the_pages_and_one_seat_of_any_size() -> None:
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


def test_admission_who_was_refused_gets_in_when_room_comes_back_whatever_others_ask_for() -> None:
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
    server.open("a")  # nobody waits any more


def test_admission_own_refusals_do_not_hold_a_peer_back() -> None:
    server = Server()
    server.open("b", ROOM)
    server.refuses("a")
    server.close_one("b")
    for _ in range(8):
        server.open("a")
    server.refuses("a")
    server.close_one("a")
    server.open("a")


def test_admission_more_than_there_is_need_not_be_asked_for_again() -> None:
    with pytest.raises(PeerRefused) as refused:
        Server().open("a", ROOM + 1)
    assert refused.value.retry_after_s == 0
