from __future__ import annotations

from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.session.client_state import MAX_HELD_PAGES, MAX_HOLDERS, PageHolders, PrefixStore
from swarm.serving.session.replay_buffer import ReplayBuffer

PAGE_BYTES = 2 * PAGE_TOKENS


def ledger_of(rows: bytes) -> ReplayBuffer:
    buffer = ReplayBuffer(2)
    buffer.append(rows)
    return buffer


def test_store_returns_the_leading_pages_of_the_same_prefix_and_block() -> None:
    store, rows = PrefixStore(), bytes(range(5 * PAGE_TOKENS))
    store.keep([b"a", b"b", b"c"], 2, ledger_of(rows))
    for keys, block, num_pages in [
        ([b"a", b"b", b"c"], 2, 2),
        ([b"a", b"x", b"b"], 2, 1),
        ([b"x", b"b"], 2, 0),
        ([b"a", b"b"], 3, 0),
    ]:
        buffer = ReplayBuffer(2)
        store.fill(keys, block, buffer)
        assert buffer.length == num_pages * PAGE_TOKENS
        if num_pages:
            assert buffer.rows(0, buffer.length) == rows[: num_pages * PAGE_BYTES]


def test_store_drops_the_last_pages_of_the_longest_unused_prefix_first() -> None:
    store = PrefixStore(max_bytes=3 * PAGE_BYTES)
    store.keep([b"a", b"b"], 0, ledger_of(bytes(2 * PAGE_BYTES)))
    store.keep([b"c", b"d"], 0, ledger_of(bytes(2 * PAGE_BYTES)))
    assert store.num_bytes == 3 * PAGE_BYTES
    buffer = ReplayBuffer(2)
    store.fill([b"a", b"b"], 0, buffer)
    assert buffer.length == PAGE_TOKENS


def test_holders_name_the_servers_that_have_the_first_pages_without_a_gap() -> None:
    holders = PageHolders()
    holders.add("p", [b"a", b"b", b"c"])
    holders.add("q", [b"a", b"b"])
    holders.add("r", [b"b", b"c"])
    assert holders.cached_tokens([b"a", b"b", b"c"]) == {"p": 3 * PAGE_TOKENS, "q": 2 * PAGE_TOKENS}
    assert holders.cached_tokens([b"a", b"x", b"c"]) == {"p": PAGE_TOKENS, "q": PAGE_TOKENS}
    assert holders.cached_tokens([b"y"]) == holders.cached_tokens([]) == {}


def test_holders_forget_the_last_pages_of_the_oldest_prefix_first() -> None:
    holders = PageHolders()
    holders.add("p", [b"a", b"b"])
    holders.add("p", [b"%d" % number for number in range(MAX_HELD_PAGES - 1)])
    assert holders.cached_tokens([b"a", b"b"]) == {"p": PAGE_TOKENS}
    assert holders.cached_tokens([b"0", b"1"]) == {"p": 2 * PAGE_TOKENS}


def test_holders_keep_the_servers_that_computed_a_page_last() -> None:
    holders = PageHolders()
    for number in (*range(MAX_HOLDERS + 4), 4, 4):
        holders.add(f"p{number}", [b"a"])
    assert set(holders.cached_tokens([b"a"])) == {f"p{number}" for number in range(4, MAX_HOLDERS + 4)}
