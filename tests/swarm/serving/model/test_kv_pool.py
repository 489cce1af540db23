from __future__ import annotations

import math

import pytest
import torch
from support.arithmetic_span import NUM_BLOCKS, Sums, generate, prompt_of, with_engine
from swarm.serving.engine.engine import Engine
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool, KVShape, Prefault
from swarm_protocol.errors import ConfigError, IntegrityError

SHAPES = [
    KVShape(num_heads=2, key_width=8, value_width=8),
    KVShape(num_heads=1, key_width=12, value_width=4),
    KVShape(num_heads=2, key_width=8, value_width=8),
]
TOKEN_VALUES = 2 * 16 + 16 + 2 * 16
NUM_PAGES = 6


def filled(dtype: torch.dtype = torch.float32, seed: int = 0) -> KVPool:
    pool = KVPool(SHAPES, NUM_PAGES, dtype, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*pool.keys_SKD, *pool.values_SKD):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


def test_pool_takes_exactly_its_pages() -> None:
    pool = filled()
    assert pool.page_bytes == PAGE_TOKENS * TOKEN_VALUES * 4
    assert pool.num_bytes == NUM_PAGES * pool.page_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_read_and_write_move_pages_to_other_ids_of_another_pool(dtype: torch.dtype) -> None:
    ours, theirs = filled(dtype), filled(dtype, seed=1)
    before = theirs.read([0, 1, 3, 5], 0, 3)
    data = ours.read([4, 1], 0, 3)
    assert len(data) == 2 * ours.page_bytes
    theirs.write([2, 4], 0, 3, data)
    assert theirs.read([2, 4], 0, 3) == data
    assert theirs.read([0, 1, 3, 5], 0, 3) == before
    assert theirs.read([4, 2], 0, 3) == ours.read([1, 4], 0, 3)


def test_write_of_some_blocks_leaves_the_others() -> None:
    ours, theirs = filled(), filled(seed=1)
    others = theirs.read([2], 0, 1) + theirs.read([2], 2, 3)
    theirs.write([2], 1, 2, ours.read([0], 1, 2))
    assert theirs.read([2], 1, 2) == ours.read([0], 1, 2)
    assert theirs.read([2], 0, 1) + theirs.read([2], 2, 3) == others


def test_layout_differs_between_caches_of_equal_size() -> None:
    pool = filled(torch.bfloat16)
    assert pool.layout(0, 1) == pool.layout(2, 3) == filled(torch.bfloat16, seed=1).layout(0, 1)
    assert pool.layout(0, 2) != pool.layout(1, 3)
    assert pool.layout(0, 3) != filled(torch.float16).layout(0, 3)
    assert pool.page_bytes == filled(torch.float16).page_bytes


@pytest.mark.parametrize("change", [-1, 1, -4])
def test_write_of_other_sizes_is_refused_and_changes_nothing(change: int) -> None:
    pool = filled()
    before = pool.read([0, 1], 0, 3)
    data = (before + b"\0")[: len(before) + change]
    with pytest.raises(IntegrityError, match=f"{len(data)} bytes of cache for 2 pages"):
        pool.write([0, 1], 0, 3, data)
    assert pool.read([0, 1], 0, 3) == before


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_write_refuses_numbers_that_are_not_finite(number: float) -> None:
    pool, donor = filled(), filled(seed=1)
    donor.values_SKD[2][17, 1, 3] = number
    before = pool.read([1], 0, 3)
    with pytest.raises(IntegrityError, match="not finite"):
        pool.write([1], 0, 3, donor.read([1], 0, 3))
    assert pool.read([1], 0, 3) == before


def test_read_and_write_of_no_pages_are_empty() -> None:
    pool = filled()
    assert pool.read([], 0, 3) == b""
    pool.write([], 0, 3, b"")


def test_pool_larger_than_memory_is_refused_with_a_clear_message() -> None:
    with pytest.raises(ConfigError, match="not enough memory for a cache of"):
        KVPool(SHAPES, 2**45, torch.float32, "cpu")


NUM_PREFAULT_PAGES = 100


class RecordingPool:
    """A pool for which the system provides 10 pages at a time."""

    num_pages = NUM_PREFAULT_PAGES
    num_pages_at_once = 10

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def make_resident(self, first: int, end: int) -> None:
        self.asked.append((first, end))


def asked_for(*nums_touched: int) -> list[tuple[int, int]]:
    pool = RecordingPool()
    residency = Prefault(pool)  # type: ignore[arg-type]
    for num_touched in nums_touched:
        residency.keep_ahead(num_touched)
    residency._thread.shutdown()
    return pool.asked


def test_keep_ahead_asks_before_pages_are_used_and_for_several_together() -> None:
    assert asked_for(*range(17)) == [(0, 10), (10, 15), (15, 20), (20, 25)]


def test_keep_ahead_of_pages_that_were_used_asks_for_none() -> None:
    assert asked_for(0, 40, 40, 41) == [(0, 10), (40, 50)]


def test_keep_ahead_ends_with_the_pool() -> None:
    assert asked_for(93, 96, 99, 100) == [(93, 100)]
    assert asked_for(85, 89, 92, 96, 100) == [(85, 95), (95, 100)]


def test_engine_asks_at_its_start_and_as_its_sequences_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(KVPool, "num_pages_at_once", 4)
    monkeypatch.setattr(KVPool, "make_resident", lambda _pool, first, end: asked.append((first, end)))

    async def work(engine: Engine, _span: Sums) -> None:
        sequence = engine.open(client="c", start=0, end=NUM_BLOCKS, max_tokens=4 * PAGE_TOKENS)
        await generate(sequence, prompt_of(PAGE_TOKENS), 2 * PAGE_TOKENS)
        assert engine.pages.num_touched == 3
        sequence.close()
        # its thread handles requests in order, and an engine that closes drops the waiting ones
        engine._prefault._thread.submit(lambda: None).result()

    with_engine(work, num_pages=20)
    assert asked == [(0, 4), (4, 6)]
