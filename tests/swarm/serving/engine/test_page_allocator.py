"""Pages belong to one sequence, are shared where their content is equal, are kept while there is room, and are never
lost.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from swarm.serving.engine.page_allocator import PageAllocator, PageInputs, PageTable

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


def reserved(allocator: PageAllocator, num_pages: int, *keys: bytes) -> PageTable:
    page_table = allocator.reserve(num_pages, keys)
    assert page_table is not None
    return page_table


def filled(allocator: PageAllocator, *keys: bytes) -> PageTable:
    page_table = reserved(allocator, len(keys))
    allocator.grow(page_table, len(keys))
    for index, key in enumerate(keys):
        allocator.register(page_table, index, key)
    return page_table


def test_reserve_gives_exactly_the_pages_that_it_promised() -> None:
    allocator = PageAllocator(4)
    first = reserved(allocator, 3)
    assert allocator.num_free == 1
    assert allocator.reserve(2) is None
    second = reserved(allocator, 1)
    allocator.grow(first, 3)
    allocator.grow(second, 1)
    assert sorted(first.pages + second.pages) == [0, 1, 2, 3]


def test_extend_reserves_more_pages_as_long_as_some_are_free() -> None:
    allocator = PageAllocator(4)
    first, second = reserved(allocator, 1), reserved(allocator, 1)
    assert allocator.extend(first, 3)
    assert (first.num_pages, allocator.num_free) == (3, 0)
    assert allocator.extend(first, 2), "it has them already"
    assert not allocator.extend(second, 2)
    assert (second.num_pages, allocator.num_free) == (1, 0)
    allocator.grow(first, 3)
    allocator.release(first)
    assert allocator.extend(second, 4)
    allocator.release(second)
    assert allocator.num_free == 4


def test_num_touched_counts_each_page_once_when_it_is_held_again() -> None:
    allocator = PageAllocator(4)
    first = reserved(allocator, 3)
    assert allocator.num_touched == 0
    allocator.grow(first, 2)
    assert allocator.num_touched == 2
    allocator.release(first)
    second = reserved(allocator, 3)
    allocator.grow(second, 2)
    assert allocator.num_touched == 2
    allocator.grow(second, 3)
    assert allocator.num_touched == 3


def test_reserve_shared_pages_cost_no_room() -> None:
    allocator = PageAllocator(4)
    first = filled(allocator, A, B)
    second = reserved(allocator, 4, A, B)
    assert second.pages == first.pages
    assert (second.num_shared, allocator.num_free) == (2, 0)


def test_reserve_stops_at_the_first_key_that_is_missing() -> None:
    allocator = PageAllocator(4)
    filled(allocator, A, C)
    assert reserved(allocator, 3, A, B, C).num_shared == 1


def test_release_keeps_registered_pages_until_their_room_is_used() -> None:
    allocator = PageAllocator(3)
    allocator.release(filled(allocator, A, B))
    assert (allocator.num_free, allocator.num_kept) == (3, 2)
    page_table = reserved(allocator, 2)
    allocator.grow(page_table, 2)
    # one blank page was left; the end of a prefix is dropped before its beginning
    assert reserved(allocator, 1, A, B).num_shared == 1
    allocator.release(page_table)
    assert allocator.num_free == 2


def test_release_keeps_the_pages_that_were_used_last() -> None:
    allocator = PageAllocator(2)
    allocator.release(filled(allocator, A))
    allocator.release(filled(allocator, B))
    allocator.release(reserved(allocator, 1, A))
    page_table = reserved(allocator, 1)
    allocator.grow(page_table, 1)
    assert reserved(allocator, 1, A).num_shared == 1
    assert allocator.num_free == 0


def test_reserve_a_kept_page_counts_as_room_once() -> None:
    allocator = PageAllocator(2)
    allocator.release(filled(allocator, A))
    assert allocator.reserve(3, [A]) is None
    assert allocator.num_kept == 1
    assert reserved(allocator, 2, A).num_shared == 1
    assert allocator.num_free == 0


def test_empty_keeps_the_room_of_the_pages() -> None:
    allocator = PageAllocator(3)
    page_table = filled(allocator, A, B)
    allocator.empty(page_table)
    assert (page_table.pages, page_table.num_promised, allocator.num_free) == ([], 2, 1)


def test_register_leaves_the_page_private_when_its_key_is_taken() -> None:
    allocator = PageAllocator(4)
    first, second = filled(allocator, A), filled(allocator, A)
    allocator.release(second)
    assert allocator.num_kept == 0
    allocator.release(first)
    assert allocator.num_kept == 1


def test_num_freed_by_counts_pages_that_no_other_sequence_holds() -> None:
    allocator = PageAllocator(6)
    filled(allocator, A)
    page_table = reserved(allocator, 4, A)
    before = allocator.num_free
    promised = allocator.num_freed_by(page_table)
    allocator.release(page_table)
    assert allocator.num_free - before == promised == 3


class Pages(RuleBasedStateMachine):
    """Prefixes are words over two letters, so that many of them collide."""

    holdings = Bundle("holdings")

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.held: dict[PageTable, list[bytes]] = {}
        self.content: dict[int, bytes] = {}

    @rule(target=holdings, num_pages=st.integers(1, 8), word=st.text("xy", max_size=6))
    def reserve(self, num_pages: int, word: str) -> Any:
        free = self.pages.num_free
        keys = [word[: index + 1].encode() for index in range(len(word))]
        page_table = self.pages.reserve(num_pages, keys)
        if page_table is None:
            assert self.pages.num_free == free
            return multiple()
        assert page_table.num_pages == num_pages
        # a sequence that shares a page finds the content that its key names
        assert [self.content[page] for page in page_table.pages] == keys[: page_table.num_shared]
        computed_from = self.pages.inputs_of(page_table)
        assert [each.before for each in computed_from if each] == keys[: page_table.num_shared]
        self.held[page_table] = keys[: page_table.num_shared]
        return page_table

    @rule(page_table=holdings, letters=st.text("xy", min_size=1, max_size=4), register=st.booleans())
    def write(self, page_table: PageTable, letters: str, register: bool) -> None:
        if page_table not in self.held:
            return
        for letter in letters[: page_table.num_promised]:
            keys = self.held[page_table]
            self.pages.grow(page_table, len(keys) + 1)
            keys.append((keys[-1] if keys else b"") + letter.encode())
            page = page_table.pages[-1]
            assert all(page not in other.pages for other in self.held if other is not page_table)
            self.content[page] = keys[-1]
            if register:
                self.pages.register(page_table, len(keys) - 1, keys[-1], PageInputs(keys[-1], b""))

    @rule(page_table=holdings)
    def empty(self, page_table: PageTable) -> None:
        others = [other for other in self.held if other is not page_table]
        if page_table in self.held and not any({*page_table.pages} & {*other.pages} for other in others):
            num_pages = page_table.num_pages
            self.pages.empty(page_table)
            assert page_table.num_promised == page_table.num_pages == num_pages
            self.held[page_table].clear()

    @rule(page_table=holdings, num_pages=st.integers(0, 8))
    def extend(self, page_table: PageTable, num_pages: int) -> None:
        before, num_free = page_table.num_pages, self.pages.num_free
        has_room = num_pages - before <= num_free
        assert self.pages.extend(page_table, num_pages) == has_room
        assert page_table.num_pages == (max(before, num_pages) if has_room else before)

    @rule(page_table=consumes(holdings))
    def release(self, page_table: PageTable) -> None:
        freed, before = self.pages.num_freed_by(page_table), self.pages.num_free
        self.pages.release(page_table)
        assert self.pages.num_free - before == freed
        self.pages.release(page_table)
        self.held.pop(page_table, None)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "allocator"):
            return
        held = {page for page_table in self.held for page in page_table.pages}
        promised = sum(page_table.num_promised for page_table in self.held)
        assert self.pages.num_free == self.pages.num_pages - len(held) - promised >= 0
        for page_table, keys in self.held.items():
            assert [self.content[page] for page in page_table.pages] == keys


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
