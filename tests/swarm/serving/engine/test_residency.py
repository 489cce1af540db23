from __future__ import annotations

import asyncio

from swarm.serving.engine.residency import Residency

NUM_PAGES = 100


class RecordingPool:
    """Of which the system gives 10 pages at a time."""

    num_pages = NUM_PAGES
    huge_page = 10

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def make_resident(self, first: int, end: int) -> None:
        self.asked.append((first, end))


def asked_for(*nums_touched: int) -> list[tuple[int, int]]:
    pool = RecordingPool()

    async def main() -> None:
        residency = Residency(pool)
        for num_touched in nums_touched:
            residency.keep_ahead(num_touched)
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(main())
    return sorted(pool.asked)


def test_keep_ahead_asks_before_pages_are_used_and_for_several_together() -> None:
    assert asked_for(*range(17)) == [(0, 10), (10, 15), (15, 20), (20, 25)]


def test_keep_ahead_of_pages_that_were_used_asks_for_none() -> None:
    assert asked_for(0, 40, 40, 41) == [(0, 10), (40, 50)]


def test_keep_ahead_ends_with_the_pool() -> None:
    assert asked_for(93, 96, 99, 100) == [(93, 100)]
    assert asked_for(85, 89, 92, 96, 100) == [(85, 95), (95, 100)]
