"""Work that an event ends early: its result, its errors, and what a cancellation leaves."""

from __future__ import annotations

import asyncio

import pytest
from swarm.ended_tasks import unless
from swarm.testing import virtual_time


def test_work_that_ends_first_gives_its_result_or_its_error() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        assert await unless(asyncio.Event(), asyncio.sleep(1, "done")) == "done"
        with pytest.raises(ValueError, match="no"):
            await unless(asyncio.Event(), fail())

    virtual_time.run(main())


@pytest.mark.parametrize(("hold", "found"), [(False, None), (True, "kept")])
def test_work_is_cancelled_by_the_event_and_what_it_returns_in_spite_of_that_is_not_lost(
    hold: bool, found: str | None
) -> None:
    """A network that is made all the same must be closed by whoever asked for it."""

    async def work() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not hold:
                raise
        return "kept"

    async def main() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        began_s = loop.time()
        loop.call_later(1, stopped.set)
        assert await unless(stopped, work()) == found
        assert loop.time() == began_s + 1

    virtual_time.run(main())


def test_cancelling_the_wait_cancels_the_work() -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await unless(asyncio.Event(), work())
        assert ended.is_set()

    virtual_time.run(main())
