"""Networks share a server's sequences and pages, and so do the peers of each network: a party may take all that no
other asks for, and its equal share while others wait.

A peer is named by a letter, or by its network and a number, as in `lan.1`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from support.work_count import num_lines
from swarm.serving.peer_shares import KEPT_S, REST_S, RETRY_AFTER_S, WAIT_S, PeerShares, Sharer
from swarm_protocol.errors import PeerRefused

ROOM = 100


class Names:
    """How peers are named in a test. All are in the network `only`, if it is set."""

    only = ""


def sharer(name: str) -> Sharer:
    network, _, _ = name.partition(".")
    return Sharer(Names.only or network, name)


@pytest.fixture(params=["", "lan"], ids=["peers in networks of their own", "peers in one network"])
def shares_alike(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks, and the peers of one network, share by the same rules."""
    monkeypatch.setattr(Names, "only", request.param)


alike = pytest.mark.usefixtures("shares_alike")


@dataclass(eq=False)
class Sequence:
    sharer: Sharer
    num_pages: int
    since_s: float = 0.0
    idle_since_s: float = 0.0
    is_idle: bool = False


def held(names: Iterable[str], num_pages: int = 1) -> list[Sequence]:
    return [Sequence(sharer(name), num_pages) for name in names]


class Server:
    """A server with eight sequences and ROOM pages."""

    def __init__(self) -> None:
        self.held: list[Sequence] = []
        self.shares = PeerShares(self.held, 8, ROOM)
        self.now_s = 0.0

    def open(self, name: str, num_pages: int = 1) -> None:
        self.shares.check(sharer(name), num_pages, now_s=self.now_s)
        if len(self.held) >= 8 or num_pages + sum(sequence.num_pages for sequence in self.held) > ROOM:
            raise self.shares.refused(sharer(name), num_pages, now_s=self.now_s, num_more=1)
        self.held.append(Sequence(sharer(name), num_pages))
        self.shares.admitted(sharer(name), num_pages, now_s=self.now_s)

    def refuses(self, name: str, num_pages: int = 1) -> None:
        with pytest.raises(PeerRefused) as refused:
            self.open(name, num_pages)
        assert refused.value.retry_after_s == RETRY_AFTER_S

    def close_one(self, name: str) -> None:
        self.held.remove(next(sequence for sequence in self.held if sequence.sharer == sharer(name)))

    @property
    def peers(self) -> list[str]:
        return [sequence.sharer.peer_id for sequence in self.held]

    def check_growth(self, name: str, num_more: int) -> None:
        self.shares.check_growth(sharer(name), num_more, now_s=self.now_s)


@alike
def test_shares_let_a_peer_take_all_when_it_is_alone() -> None:
    server = Server()
    for _ in range(8):
        server.open("a", 12)
    server.refuses("a")


@alike
def test_shares_let_a_peer_take_what_no_other_asks_for() -> None:
    """A gateway has many users, and one visitor with one session must not cost them half of the server."""
    server = Server()
    server.open("b")
    for _ in range(7):
        server.open("a")
    with pytest.raises(PeerRefused, match="the server is full: all 8 sessions are open"):
        server.open("a")


def test_shares_keep_places_for_peers_and_networks_that_hold_none() -> None:
    opened = held(["lan.1"] * 30)
    shares = PeerShares(opened, 32, num_kept=2)
    assert [shares.places_for(sharer(name)) for name in ("lan.1", "lan.2", "b")] == [30, 31, 32]
    with pytest.raises(PeerRefused, match="all 32 sessions are open, but for 2 for those without any"):
        raise shares.refused(sharer("lan.1"), 1, now_s=0.0, num_more=1)
    opened += held("b")
    shares.check(sharer("b"), 1, now_s=0.0)  # lan.1 does not wait: it has all that it may have


@alike
def test_shares_keep_room_for_a_large_session_also_while_those_that_grow_are_refused() -> None:
    shares = PeerShares(held(["gateway"], 60), 8, ROOM)
    for at_s in range(0, 2 * int(WAIT_S), 2):
        shares.refused(sharer("gateway"), 1, now_s=float(at_s))
        shares.refused(sharer("gateway"), 50, now_s=at_s + 1.0, num_more=1)
    with pytest.raises(PeerRefused, match="its cache has no room for 5 more pages"):
        shares.check_turn(sharer("gateway"), 5, num_free=40, now_s=2 * WAIT_S)
    shares.check_turn(sharer("gateway"), 50, num_free=50, now_s=2 * WAIT_S)


@alike
def test_shares_keep_room_for_a_quarter_of_the_time_for_a_peer_that_always_asks_for_too_much() -> None:
    shares, num_kept, minutes = PeerShares(held(["gateway"], 60), 8, ROOM), 0, 10
    for at_s in range(60 * minutes):
        if not at_s % RETRY_AFTER_S:
            shares.refused(sharer("stranger"), 50 + at_s // 60, now_s=float(at_s), num_more=1)
        try:
            shares.check_turn(sharer("gateway"), 5, num_free=40, now_s=at_s + 0.5)
        except PeerRefused:
            num_kept += 1
    assert KEPT_S <= num_kept <= 60 * minutes * KEPT_S / (KEPT_S + REST_S) + KEPT_S


@alike
def test_shares_give_a_freed_place_to_a_peer_that_waits() -> None:
    server = Server()
    for _ in range(8):
        server.open("a")
    for number, peer in enumerate(("b", "c", "d")):
        server.refuses(peer)
        server.close_one("a")
        with pytest.raises(PeerRefused, match=f" {7 - number} sessions already use the share of one"):
            server.open("a")
        server.open(peer)
    assert server.peers == [*"aaaaabcd"]
    server.refuses("b")  # it has less than a quarter, so it waits
    server.close_one("a")
    server.refuses("a")
    server.open("b")
    server.refuses("b")  # it has a quarter, so nobody waits
    server.close_one("c")
    server.open("a")


@alike
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


@alike
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


@alike
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


@alike
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


@alike
def test_shares_let_a_session_grow_beyond_half_of_the_pages_unless_another_peer_waits() -> None:
    server = Server()
    server.open("a", 40)
    server.open("b", 10)
    server.check_growth("a", 50)
    server.refuses("c", 60)
    server.check_growth("a", 10)
    server.check_growth("b", 40)
    with pytest.raises(PeerRefused, match="are waiting"):
        server.check_growth("a", 11)
    server.now_s += WAIT_S
    server.check_growth("a", 11)


@alike
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


@alike
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


@alike
def test_room_is_kept_for_a_large_session_while_another_peer_asks_for_sessions_of_thousands_of_sizes() -> None:
    shares = PeerShares(held(["gateway"], 6000), 8, 100 * ROOM)
    for at_s in range(0, 2 * int(WAIT_S), 2):
        shares.refused(sharer("visitor"), 5000, now_s=float(at_s), num_more=1)
        for num_pages in range(1, 1100):
            shares.refused(sharer("stranger"), num_pages, now_s=at_s + 1.0, num_more=1)
    with pytest.raises(PeerRefused, match="no room for 50 more pages"):
        shares.check_turn(sharer("gateway"), 50, num_free=4000, now_s=2 * WAIT_S)


@alike
@pytest.mark.parametrize("num_pages", [40, 60])
def test_room_is_kept_for_a_session_though_its_peer_asked_once_for_one_of_another_size(num_pages: int) -> None:
    """Another user of a gateway was served elsewhere."""
    shares = PeerShares(held(["a"], 50), 8, ROOM)
    for at_s in range(0, 12, 2):
        shares.refused(sharer("gateway"), 50, now_s=float(at_s), num_more=1)
        if at_s == 6:
            shares.refused(sharer("gateway"), num_pages, now_s=6.5, num_more=1)
    shares.check_turn(sharer("gateway"), 50, num_free=50, now_s=11.0)
    for at_s in (11.0, 15.0):
        with pytest.raises(PeerRefused, match="no room for 5 more pages"):
            shares.check_turn(sharer("a"), 5, num_free=50, now_s=at_s)


def test_request_of_one_of_a_thousand_keys_that_wait_takes_little_more_work_than_of_ten() -> None:
    def num_lines_beside(num_keys: int) -> int:
        server = Server()
        for name in "aaaabbbb":
            server.open(name)
        for server.now_s in (0.0, 2.0, 4.0, 7.0):
            for number in range(num_keys):
                server.refuses(f"sybils.{number}")
        return num_lines(lambda: server.refuses("sybils.5"))

    assert num_lines_beside(1000) < 2 * num_lines_beside(10)


def test_network_waits_on_when_one_of_its_peers_is_admitted_and_others_wait() -> None:
    server = Server()
    for key in KEYS[:8]:
        server.open(key)
    for name in ("lan.1", "lan.2"):
        server.refuses(name)
    for number, name in enumerate(("lan.1", "lan.2")):
        server.close_one(KEYS[number])
        server.refuses(KEYS[8])
        server.open(name)
    server.close_one(KEYS[2])
    server.open(KEYS[8])


KEYS = [f"sybils.{number}" for number in range(100)]


def test_keys_of_one_network_cost_another_network_what_one_peer_costs() -> None:
    server = Server()
    for key in KEYS[:8]:
        server.open(key)
    for key in KEYS[8:]:
        server.refuses(key)
    server.refuses("a")
    for number in range(4):
        server.close_one(KEYS[number])
        for key in KEYS[8:]:
            with pytest.raises(PeerRefused, match=f"your network's {7 - number} sessions already use the share"):
                server.open(key)
        server.open("a")
        server.refuses("a")
    server.close_one("a")  # each network has its half
    server.open(KEYS[9])


def test_keys_of_one_network_that_only_ask_leave_another_network_half() -> None:
    server = Server()
    for _ in range(8):
        server.open("a", 2)
    for key in KEYS:
        server.refuses(key, 99)
    for _ in range(4):
        server.close_one("a")
        server.refuses("a", 2)
    server.close_one("a")
    server.open("a", 2)


def test_peers_of_one_network_share_what_is_the_network_s_while_another_network_waits() -> None:
    server = Server()
    for name, num_pages in (("a", 60), ("lan.1", 1), ("lan.1", 1)):
        server.open(name, num_pages)
    server.refuses("b", 50)
    with pytest.raises(PeerRefused, match="your network's 2 sessions already use the share of one network"):
        server.open("lan.2")
    server.close_one("lan.1")
    with pytest.raises(PeerRefused, match="your 1 sessions already use the share of one peer"):
        server.open("lan.1")
    server.open("lan.2")


def test_peers_of_one_network_share_all_while_no_other_network_waits() -> None:
    server = Server()
    server.open("a")
    for _ in range(7):
        server.open("lan.1")
    for _ in range(3):
        server.refuses("lan.2")
        server.close_one("lan.1")
        server.refuses("lan.1")
        server.open("lan.2")
    for name in ("lan.1", "lan.2"):  # each has at most half of all
        server.refuses(name)
        server.close_one(name)
        server.open(name)


def test_session_grows_beyond_half_with_those_of_its_network_only_while_no_other_network_waits() -> None:
    server = Server()
    server.open("lan.1", 30)
    server.open("lan.2", 30)
    server.check_growth("lan.1", 10)
    server.refuses("a", 50)
    with pytest.raises(PeerRefused, match="your network's sessions use more than half of the cache"):
        server.check_growth("lan.1", 10)


def test_room_is_kept_for_many_keys_of_one_network_no_longer_than_for_one_peer() -> None:
    shares, num_kept, minutes = PeerShares(held(["gateway"], 60), 8, ROOM), 0, 10
    for at_s in range(60 * minutes):
        if not at_s % RETRY_AFTER_S:
            for key in KEYS[at_s // 20 % 20 :: 20]:
                shares.refused(sharer(key), 50, now_s=float(at_s), num_more=1)
        try:
            shares.check_turn(sharer("gateway"), 5, num_free=40, now_s=at_s + 0.5)
        except PeerRefused:
            num_kept += 1
    assert KEPT_S <= num_kept <= 60 * minutes * KEPT_S / (KEPT_S + REST_S) + KEPT_S


def test_old_sequences_of_a_network_beyond_half_make_room_for_another_network_and_not_for_its_own_peers() -> None:
    opened = held(KEYS[:8], 12)
    shares = PeerShares(opened, 8, ROOM)
    assert list(shares.evictable(sharer("a"), 12, now_s=60.0)) == opened[:4]
    assert list(shares.evictable(sharer(KEYS[8]), 12, now_s=60.0)) == []
    assert list(shares.evictable(sharer("a"), 51, now_s=60.0)) == []
