"""When the cache's next memory is asked for, and by whom."""

from __future__ import annotations

import pytest
from support.arithmetic_span import NUM_BLOCKS, Sums, generate, prompt_of, with_engine
from swarm.serving.engine.engine import Engine
from swarm.serving.engine.prefault import Residency
from swarm.serving.model.batch import PAGE_TOKENS
from swarm.serving.model.kv_pool import KVPool

NUM_PAGES = 100


class RecordingPool:
    """Of which the system gives 10 pages at a time."""

    num_pages = NUM_PAGES
    num_pages_at_once = 10

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def make_resident(self, first: int, end: int) -> None:
        self.asked.append((first, end))


def asked_for(*nums_touched: int) -> list[tuple[int, int]]:
    pool = RecordingPool()
    residency = Residency(pool)  # type: ignore[arg-type]
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


def test_engine_asks_at_its_start_and_as_its_seats_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(KVPool, "num_pages_at_once", 4)
    monkeypatch.setattr(KVPool, "make_resident", lambda _pool, first, end: asked.append((first, end)))

    async def work(engine: Engine, _span: Sums) -> None:
        seat = engine.open(client="c", start=0, end=NUM_BLOCKS, max_tokens=4 * PAGE_TOKENS)
        await generate(seat, prompt_of(PAGE_TOKENS), 2 * PAGE_TOKENS)
        assert engine.book.num_touched == 3
        seat.close()

    with_engine(work, num_pages=20)
    assert asked == [(0, 4), (4, 6)]
