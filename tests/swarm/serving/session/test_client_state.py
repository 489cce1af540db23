from __future__ import annotations

from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.session.client_state import PrefixStore
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
