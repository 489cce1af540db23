"""Pages are given to one seat, shared where their content is the same, kept while there is room, and never lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from swarm.serving.engine.page_allocator import RETRY_AFTER_S, WAIT_S, Admission, PageAllocator, PageTable
from swarm_protocol.errors import PeerRefused

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


def reserved(book: PageAllocator, num_pages: int, *keys: bytes) -> PageTable:
    holding = book.reserve(num_pages, keys)
    assert holding is not None
    return holding


def filled(book: PageAllocator, *keys: bytes) -> PageTable:
    holding = reserved(book, len(keys))
    book.grow(holding, len(keys))
    for index, key in enumerate(keys):
        book.register(holding, index, key)
    return holding


def test_reserve_what_is_promised_is_there_and_nothing_more() -> None:
    book = PageAllocator(4)
    first = reserved(book, 3)
    assert book.num_free == 1
    assert book.reserve(2) is None
    second = reserved(book, 1)
    book.grow(first, 3)
    book.grow(second, 1)
    assert sorted(first.pages + second.pages) == [0, 1, 2, 3]


def test_num_touched_counts_pages_that_were_ever_held_once() -> None:
    book = PageAllocator(4)
    first = reserved(book, 3)
    assert book.num_touched == 0
    book.grow(first, 2)
    assert book.num_touched == 2
    book.release(first)
    second = reserved(book, 3)
    book.grow(second, 2)
    assert book.num_touched == 2
    book.grow(second, 3)
    assert book.num_touched == 3


def test_reserve_shared_pages_cost_no_room() -> None:
    book = PageAllocator(4)
    first = filled(book, A, B)
    second = reserved(book, 4, A, B)
    assert second.pages == first.pages
    assert (second.num_shared, book.num_free) == (2, 0)


def test_reserve_stops_at_the_first_key_that_is_missing() -> None:
    book = PageAllocator(4)
    filled(book, A, C)
    assert reserved(book, 3, A, B, C).num_shared == 1


def test_release_keeps_registered_pages_until_their_room_is_used() -> None:
    book = PageAllocator(3)
    book.release(filled(book, A, B))
    assert (book.num_free, book.num_kept) == (3, 2)
    holding = reserved(book, 2)
    book.grow(holding, 2)
    # one blank page was left; the end of the prefix goes before its beginning
    assert reserved(book, 1, A, B).num_shared == 1
    book.release(holding)
    assert book.num_free == 2


def test_release_keeps_what_was_used_last() -> None:
    book = PageAllocator(2)
    book.release(filled(book, A))
    book.release(filled(book, B))
    book.release(reserved(book, 1, A))
    holding = reserved(book, 1)
    book.grow(holding, 1)
    assert reserved(book, 1, A).num_shared == 1
    assert book.num_free == 0


def test_reserve_a_kept_page_counts_as_room_once() -> None:
    book = PageAllocator(2)
    book.release(filled(book, A))
    assert book.reserve(3, [A]) is None
    assert book.num_kept == 1
    assert reserved(book, 2, A).num_shared == 1
    assert book.num_free == 0


def test_shrink_gives_shared_pages_back_only_where_own_ones_can_replace_them() -> None:
    book = PageAllocator(3)
    filled(book, A, B)
    holding = reserved(book, 3, A, B)
    assert not book.shrink(holding, 1)
    assert (holding.num_shared, book.num_free) == (2, 0)
    book.release(holding)
    holding = reserved(book, 2, A, B)
    assert book.shrink(holding, 1)
    assert (holding.num_shared, holding.num_promised, book.num_free) == (1, 1, 0)


def test_register_a_key_that_is_there_leaves_the_page_private() -> None:
    book = PageAllocator(4)
    first, second = filled(book, A), filled(book, A)
    book.release(second)
    assert book.num_kept == 0
    book.release(first)
    assert book.num_kept == 1


def test_num_freed_by_counts_what_nobody_else_holds() -> None:
    book = PageAllocator(6)
    filled(book, A)
    holding = reserved(book, 4, A)
    before = book.num_free
    promised = book.num_freed_by(holding)
    book.release(holding)
    assert book.num_free - before == promised == 3


class Pages(RuleBasedStateMachine):
    """Prefixes are words over two letters: few enough to collide."""

    holdings = Bundle("holdings")

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.book = PageAllocator(num_pages)
        self.held: dict[PageTable, list[bytes]] = {}
        self.content: dict[int, bytes] = {}

    @rule(target=holdings, num_pages=st.integers(1, 8), word=st.text("xy", max_size=6))
    def reserve(self, num_pages: int, word: str) -> Any:
        free = self.book.num_free
        keys = [word[: index + 1].encode() for index in range(len(word))]
        holding = self.book.reserve(num_pages, keys)
        if holding is None:
            assert self.book.num_free == free
            return multiple()
        assert holding.num_pages == num_pages
        # whoever shares a page finds in it what the key says
        assert [self.content[page] for page in holding.pages] == keys[: holding.num_shared]
        self.held[holding] = keys[: holding.num_shared]
        return holding

    @rule(holding=holdings, letters=st.text("xy", min_size=1, max_size=4), register=st.booleans())
    def write(self, holding: PageTable, letters: str, register: bool) -> None:
        if holding not in self.held:
            return
        for letter in letters[: holding.num_promised]:
            keys = self.held[holding]
            self.book.grow(holding, len(keys) + 1)
            keys.append((keys[-1] if keys else b"") + letter.encode())
            page = holding.pages[-1]
            assert all(page not in other.pages for other in self.held if other is not holding)
            self.content[page] = keys[-1]
            if register:
                self.book.register(holding, len(keys) - 1, keys[-1])

    @rule(holding=holdings, num_pages=st.integers(0, 4))
    def shrink(self, holding: PageTable, num_pages: int) -> None:
        if holding in self.held and self.book.shrink(holding, num_pages):
            del self.held[holding][num_pages:]

    @rule(holding=consumes(holdings))
    def release(self, holding: PageTable) -> None:
        freed, before = self.book.num_freed_by(holding), self.book.num_free
        self.book.release(holding)
        assert self.book.num_free - before == freed
        self.book.release(holding)
        self.held.pop(holding, None)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "book"):
            return
        held = {page for holding in self.held for page in holding.pages}
        promised = sum(holding.num_promised for holding in self.held)
        assert self.book.num_free == self.book.num_pages - len(held) - promised >= 0
        for holding, keys in self.held.items():
            assert [self.content[page] for page in holding.pages] == keys


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


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
