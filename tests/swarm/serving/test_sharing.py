"""Who may take how much of a server, alone and beside others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from swarm.serving.sharing import RETRY_AFTER_S, WAIT_S, Sharing
from swarm_protocol.errors import PeerRefused

ROOM = 100


@dataclass
class Session:
    peer_id: str
    max_tokens: int


class Server:
    """Eight sessions and ROOM tokens."""

    def __init__(self) -> None:
        self.sharing = Sharing(8)
        self.held: list[Session] = []
        self.now_s = 0.0

    def open(self, peer_id: str, max_tokens: int = 1) -> None:
        self.sharing.check(peer_id, max_tokens, self.held, ROOM, now_s=self.now_s)
        self.held.append(Session(peer_id, max_tokens))

    def refuses(self, peer_id: str, max_tokens: int = 1) -> None:
        with pytest.raises(PeerRefused) as refused:
            self.open(peer_id, max_tokens)
        assert refused.value.retry_after_s == RETRY_AFTER_S

    def close_one(self, peer_id: str) -> None:
        self.held.remove(next(session for session in self.held if session.peer_id == peer_id))


def test_sharing_alone_a_peer_may_take_all() -> None:
    server = Server()
    for _ in range(8):
        server.open("a", 12)
    server.refuses("a")


def test_sharing_beside_another_a_peer_gets_half_of_the_sessions() -> None:
    server = Server()
    server.open("b")
    for _ in range(4):
        server.open("a")
    server.refuses("a")
    for _ in range(3):
        server.open("b")
    server.refuses("c")  # full


def test_sharing_beside_another_a_peer_gets_half_of_the_cache_and_one_session_of_any_size() -> None:
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


def test_sharing_who_was_refused_gets_in_when_room_comes_back_whatever_others_ask_for() -> None:
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


def test_sharing_own_refusals_do_not_hold_a_peer_back() -> None:
    server = Server()
    server.open("b", ROOM)
    server.refuses("a")
    server.close_one("b")
    for _ in range(8):
        server.open("a")
    server.refuses("a")
    server.close_one("a")
    server.open("a")
