"""Keys of pages are equal for equal tokens, however these are split, and differ for all others."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.wire.page_keys import KEY_BYTES, PageKeyChain, page_keys, root_key

TOKENS = list(range(100, 100 + 5 * PAGE_TOKENS))

PINNED = "a57b77b7b0f9e228998dee1dfc51258a"


def test_page_keys_exist_only_for_full_pages() -> None:
    assert page_keys("r", TOKENS[: PAGE_TOKENS - 1]) == []
    assert len(page_keys("r", TOKENS)) == 5
    assert page_keys("r", [*TOKENS, 1, 2]) == page_keys("r", TOKENS)
    assert all(len(key) == KEY_BYTES for key in page_keys("r", TOKENS))


def test_page_keys_change_from_the_first_different_token_on() -> None:
    other = list(TOKENS)
    other[2 * PAGE_TOKENS] += 1
    same = [a == b for a, b in zip(page_keys("r", TOKENS), page_keys("r", other), strict=True)]
    assert same == [True, True, False, False, False]


def test_page_keys_differ_by_revision() -> None:
    assert not set(page_keys("r", TOKENS)) & set(page_keys("s", TOKENS))


def test_page_keys_of_equal_pages_differ_by_position() -> None:
    assert len(set(page_keys("r", [7] * 4 * PAGE_TOKENS))) == 4


def test_page_keys_are_pinned() -> None:
    """Clients and servers of all versions must agree."""
    assert page_keys("r", TOKENS)[-1].hex() == PINNED


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.lists(st.integers(0, 70), max_size=6))
def test_key_chain_in_any_pieces_gives_the_same_keys(tokens: list[int], cuts: list[int]) -> None:
    chain, keys = PageKeyChain(root_key("r")), []
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for begin, end in itertools.pairwise(edges):
        keys += chain.extend(tokens[begin:end])
    assert keys == page_keys("r", tokens)
