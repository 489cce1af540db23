"""The dashboard's history as its collector uses it: recording never waits, and reading has a deadline.

The event loop owns the history, a writer thread owns the database, and a few threads read it. Whatever happens to the
database, no method raises: a read that gets no answer returns an empty result.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

from swarm.training.run.signed_run import SignedRun

from swarm_node.dashboard.history import reader
from swarm_node.dashboard.history.reader import ContributionTotal, Turnover
from swarm_node.dashboard.history.recorder import Fact
from swarm_node.dashboard.history.retention import HOUR_S, RetentionLimits
from swarm_node.dashboard.history.store import HistoryError, is_damage, reason, url_of
from swarm_node.dashboard.history.writer import HistoryWriter, WriterTiming
from swarm_node.dashboard.views import ChangeEvent, PresenceView, RefusalView, Series, StepView

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_OPEN_QUERIES = 64
FRESH_S = 1.0
READ_S = 5.0
OPEN_S = 5.0
CLOSE_S = 10.0

_T = TypeVar("_T")


class DashboardHistory:
    """The history in `place`: the path of a SQLite file, or a URL such as
    `postgresql://user:password@host/database`.

    A database belongs to one dashboard. `on_warning` is called in the event loop when the database stops accepting
    writes (with the reason), when it works again, and when a damaged file was renamed. Raises ConfigError if `place`
    can never hold a history.
    """

    def __init__(
        self,
        place: Path | str,
        *,
        limits: RetentionLimits | None = None,
        timing: WriterTiming | None = None,
        clock: Callable[[], float] = time.time,
        on_warning: Callable[[HistoryError], None] | None = None,
    ) -> None:
        url_of(place)
        self._limits = limits or RetentionLimits()
        self._clock = clock
        self._on_warning = on_warning
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer = HistoryWriter(
            place, limits=self._limits, timing=timing or WriterTiming(), clock=clock, warn=self._warn
        )
        self._queries = QueryPool()

    async def __aenter__(self) -> Self:
        """Wait up to OPEN_S for the database. A slower one is opened in the background."""
        self._loop = asyncio.get_running_loop()
        self._writer.start()
        await asyncio.to_thread(self._writer.was_tried.wait, OPEN_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._queries.close()
        if not await asyncio.to_thread(self._writer.close, CLOSE_S):
            logger.warning("the history's database delays shutdown: its last seconds may be missing")

    @property
    def problem(self) -> HistoryError | None:
        """Why recorded facts wait instead of being written; None while writing works."""
        return self._writer.problem

    async def flushed(self, wait_s: float = 10.0) -> bool:
        """Wait at most `wait_s` until everything recorded is written. Return whether it is."""
        return await asyncio.to_thread(self._writer.queue.wait_empty, wait_s)

    def record(self, fact: Fact) -> None:
        """Record a fact, unless no calendar has its time."""
        if math.isfinite(fact.at) and abs(fact.at) < 1e11:
            self._writer.queue.put(fact)

    async def presence(self, peer_id: str) -> tuple[PresenceView, ...]:
        """Return the times of presence in the newest 30 days, oldest first, at most 500."""
        return await self._ask((), reader.read_presence, peer_id, int(self._clock() - self._limits.max_age_s))

    async def turnover(self, hours: float = 24.0) -> Turnover | None:
        return await self._ask(None, reader.read_turnover, int(self._clock() - hours * HOUR_S))

    async def series(self, name: str, hours: float) -> Series | None:
        """Return the newest `hours` in steps of 5 s, a minute or an hour, or None for an unknown name."""
        now, squeeze = int(self._clock()), self._writer.squeeze
        return await self._ask(None, reader.read_series, name, hours, now, self._limits, squeeze)

    async def steps(self, run: str, limit: int = reader.MAX_STEPS) -> tuple[StepView, ...]:
        """Return at most `limit` steps (500 at most), evenly chosen, oldest first."""
        return await self._ask((), reader.read_steps, run, limit)

    async def run(self, run: str) -> SignedRun | None:
        """Return a run's signed file, if it is known."""
        return await self._ask(None, reader.read_run, run)

    async def runs(self) -> tuple[str, ...] | None:
        """Return the ids of the newest 48 runs, the newest first, or None if the database does not answer."""
        return await self._ask(None, reader.read_runs)

    async def contributions(self, run: str) -> tuple[ContributionTotal, ...]:
        """Return the totals of a run, most tokens first, at most 1,000."""
        return await self._ask((), reader.read_contributions, run)

    async def contributions_of(self, peer_id: str) -> Mapping[str, ContributionTotal]:
        """Return the totals of a peer by run, of at most 1,000 runs."""
        return await self._ask({}, reader.read_contributions_of, peer_id)

    async def refusals(self, run: str) -> tuple[RefusalView, ...]:
        """Return the refusals in a run, the newest first."""
        return await self._ask((), reader.read_refusals, run)

    async def changes(self) -> tuple[ChangeEvent, ...]:
        """Return the newest 20 changes, newest first."""
        return await self._ask((), reader.read_changes)

    async def _ask(self, instead: _T, read: Callable[..., _T], *about: Hashable) -> _T:
        """Return what `read` finds for the arguments `about`, or `instead` if the database does not answer."""
        try:
            return await self._queries.ask((read, *about), lambda: self._read(read, about))
        except HistoryError as error:
            if self.problem is None:  # otherwise it was reported already
                logger.warning("the dashboard's history does not answer: %s", error)
            return instead

    def _read(self, read: Callable[..., _T], about: tuple[Hashable, ...]) -> _T:
        """Run `read` in a thread of the pool."""
        store = self._writer.store
        if store is None:
            raise HistoryError("the history's database is not open", remedy="try again later")
        try:
            with store.reading(READ_S) as connection:
                return read(connection, *about)
        except Exception as error:
            known = reason(error, store.place)
            if known is None:
                logger.warning("the history cannot be read: %s: %s", type(error).__name__, error)
                known = HistoryError("the history cannot be read", remedy="the daemon's log says why")
            elif is_damage(error):
                self._writer.suspect(known)
            raise known from error

    def _warn(self, problem: HistoryError) -> None:
        """Report a problem. Called in the writer's thread."""
        logger.warning("%s", problem)
        if self._on_warning is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_warning, problem)


class QueryPool:
    """Runs queries in its own threads, with a deadline. Equal queries share one result, which is kept for `FRESH_S`.

    Owned by the event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="history-read")
        self._asked: dict[Hashable, asyncio.Future[Any]] = {}

    async def ask(self, key: Hashable, read: Callable[[], _T]) -> _T:
        """Return what `read` returns, and raise what it raises.

        Also raises HistoryError if the query misses its deadline, or too many are open.
        """
        answer: asyncio.Future[_T] | None = self._asked.get(key)
        if answer is None:
            answer = self._begin(key, read)
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            raise _slow("the history did not answer in time") from error

    def _begin(self, key: Hashable, read: Callable[[], _T]) -> asyncio.Future[_T]:
        if sum(not answer.done() for answer in self._asked.values()) >= MAX_OPEN_QUERIES:
            raise _slow("too many queries of the history are open")
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._threads, read)
        self._asked[key] = answer

        def keep_for_a_while(done: asyncio.Future[_T]) -> None:
            is_failed = done.cancelled() or done.exception() is not None
            loop.call_later(0.0 if is_failed else FRESH_S, self._asked.pop, key, None)

        answer.add_done_callback(keep_for_a_while)
        return answer

    def close(self) -> None:
        """Start no more queries. A running query ends by its own deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _slow(message: str) -> HistoryError:
    return HistoryError(message, remedy="try again; if this persists, the database's disk or server is too slow")
