"""Asks the database without holding up the event loop: its own threads, a deadline, one query for all who ask the same.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from swarm_node.dashboard.history.facts import HistoryError

NUM_THREADS = 2
MAX_ASKED = 64
FRESH_S = 1.0

_T = TypeVar("_T")


class Asking:
    """An answer is given again for `FRESH_S`."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="history-read")
        self._asked: dict[Hashable, asyncio.Future[Any]] = {}

    async def ask(self, key: Hashable, read: Callable[[], _T]) -> _T:
        """Raises what `read` raises, and HistoryError if it takes longer than the deadline, or too many ask."""
        answer: asyncio.Future[_T] | None = self._asked.get(key)
        if answer is None:
            answer = self._begin(key, read)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            raise _slow("the history gave no answer in time") from error

    def _begin(self, key: Hashable, read: Callable[[], _T]) -> asyncio.Future[_T]:
        if sum(not answer.done() for answer in self._asked.values()) >= MAX_ASKED:
            raise _slow("the history is asked too much at once")
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._threads, read)
        self._asked[key] = answer

        def keep_for_a_while(done: asyncio.Future[_T]) -> None:
            is_failed = done.cancelled() or done.exception() is not None
            loop.call_later(0.0 if is_failed else FRESH_S, self._asked.pop, key, None)

        answer.add_done_callback(keep_for_a_while)
        return answer

    def close(self) -> None:
        """A query that runs ends by its own deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _slow(message: str) -> HistoryError:
    return HistoryError(message, remedy="try again; if it stays so, the database's disk or server is too slow")
