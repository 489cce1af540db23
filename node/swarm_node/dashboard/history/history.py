"""The dashboard's memory, as its collector uses it: told things without waiting, asked with a deadline.

The event loop owns a `History`; the database belongs to its writer's thread, and a few threads read it. Whatever
becomes of the database, nothing here raises but the reads, and those only HistoryError.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Self, TypeVar

from sqlalchemy import Connection

from swarm_node.dashboard.history import reader
from swarm_node.dashboard.history.asking import Asking
from swarm_node.dashboard.history.database import is_damage, reason, url_of
from swarm_node.dashboard.history.facts import Contribution, HistoryError, HistoryStatus, Sample, Step, Turnover
from swarm_node.dashboard.history.retention_limits import HOUR_S, Bounds
from swarm_node.dashboard.history.stored_text import finite
from swarm_node.dashboard.history.write_queue import Fact, Look, Refused, Samples
from swarm_node.dashboard.history.writer import Pace, Writer
from swarm_node.dashboard.views import Happening, PresenceView, RefusalView, Series, StepView

logger = logging.getLogger(__name__)

READ_S = 5.0
OPEN_S = 5.0
CLOSE_S = 10.0

_T = TypeVar("_T")


class History:
    """In `place`: the path of a SQLite file, or a URL such as `postgresql+pg8000://user:password@host/database`.

    A database belongs to one dashboard. `on_warning` hears, in the event loop, why the history is in memory only, and
    that a damaged file was put aside. Raises ConfigError for a place that never can be one.
    """

    def __init__(
        self,
        place: Path | str,
        *,
        bounds: Bounds | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.time,
        on_warning: Callable[[HistoryError], None] | None = None,
    ) -> None:
        url_of(place)
        self._bounds = bounds or Bounds()
        self._clock = clock
        self._on_warning = on_warning
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer = Writer(place, bounds=self._bounds, pace=pace or Pace(), clock=clock, warn=self._warn)
        self._asking = Asking(READ_S)

    async def __aenter__(self) -> Self:
        """Waits a little for the database; a slow one is opened while the daemon goes on."""
        self._loop = asyncio.get_running_loop()
        self._writer.start()
        await asyncio.to_thread(self._writer.is_open.wait, OPEN_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asking.close()
        if not await asyncio.to_thread(self._writer.close, CLOSE_S):
            logger.warning("the history's database holds up the end: its last seconds may be missing")

    @property
    def status(self) -> HistoryStatus:
        store = self._writer.store
        return HistoryStatus(
            place=store.place if store else "nowhere yet",
            problem=self._writer.problem,
            num_waiting=len(self._writer.inbox),
            num_dropped=self._writer.num_dropped,
        )

    async def flushed(self, wait_s: float = 10.0) -> bool:
        """Whether all that was told is written, or given up, within `wait_s`."""
        return await asyncio.to_thread(self._writer.inbox.wait_empty, wait_s)

    # --- telling ------------------------------------------------------------------------------------------------------

    def record_nodes(self, peer_ids: Iterable[str], at: float) -> None:
        """Everyone who is there at `at`: who came and who left since the last look follows from it."""
        self._put(Look(at, frozenset(peer_ids)), at)

    def record_samples(self, samples: Iterable[Sample], at: float) -> None:
        """Numbers that cannot be drawn are left out."""
        self._put(Samples(at, tuple(sample for sample in samples if finite(sample.value) is not None)), at)

    def record_step(self, step: Step) -> None:
        self._put(step, step.at)

    def record_refusal(self, run: str, refusal: RefusalView) -> None:
        """One for each outer step, peer, and peer who refused: the first is kept."""
        self._put(Refused(run, refusal), refusal.at)

    def record_happening(self, happening: Happening) -> None:
        self._put(happening, happening.at)

    def _put(self, fact: Fact, at: float) -> None:
        if math.isfinite(at) and abs(at) < 1e11:
            self._writer.inbox.put(fact)
        else:
            self._writer.inbox.drop(1)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def presence(self, peer_id: str) -> tuple[PresenceView, ...]:
        """Of the newest 30 days, oldest first, at most 500."""
        since = self._clock() - self._bounds.max_age_s
        return await self._ask(("presence", peer_id), lambda found: reader.read_presence(found, peer_id, since))

    async def turnover(self, hours: float = 24.0) -> Turnover:
        since = self._clock() - hours * HOUR_S
        return await self._ask(("turnover", hours), lambda found: reader.read_turnover(found, since))

    async def series(self, name: str, hours: float) -> Series | None:
        """The newest `hours`, in steps of 5 s, a minute or an hour; None for a name that nobody told."""
        now = self._clock()
        return await self._ask(
            ("series", name, hours), lambda found: reader.read_series(found, name, hours, now, self._bounds)
        )

    async def steps(self, run: str, limit: int = reader.MAX_STEPS) -> tuple[StepView, ...]:
        """At most 500, evenly chosen, oldest first."""
        return await self._ask(("steps", run, limit), lambda found: reader.read_steps(found, run, limit))

    async def contributions(self, run: str) -> tuple[Contribution, ...]:
        """Most tokens first, at most 1,000."""
        return await self._ask(("contributions", run), lambda found: reader.read_contributions(found, run))

    async def contribution(self, peer_id: str) -> Contribution:
        """To all runs that are remembered."""
        return await self._ask(("contribution", peer_id), lambda found: reader.read_contribution(found, peer_id))

    async def refusals(self, run: str, limit: int = reader.MAX_REFUSALS) -> tuple[RefusalView, ...]:
        """Newest first."""
        return await self._ask(("refusals", run, limit), lambda found: reader.read_refusals(found, run, limit))

    async def happenings(self, limit: int = 20) -> tuple[Happening, ...]:
        """Newest first."""
        return await self._ask(("happenings", limit), lambda found: reader.read_happenings(found, limit))

    async def _ask(self, key: Hashable, read: Callable[[Connection], _T]) -> _T:
        return await self._asking.ask(key, lambda: self._read(read))

    def _read(self, read: Callable[[Connection], _T]) -> _T:
        """In a reader's thread."""
        store = self._writer.store
        if store is None:
            raise HistoryError("the history's database is still being opened", remedy="try again in a moment")
        try:
            with store.reading(READ_S) as connection:
                return read(connection)
        except Exception as error:
            known = reason(error, store.place)
            if known is None:
                logger.warning("the history cannot be read: %s: %s", type(error).__name__, error)
                known = HistoryError("the history cannot be read", remedy="the daemon's log says why")
            elif is_damage(error):
                self._writer.suspect(known)
            raise known from error

    def _warn(self, problem: HistoryError) -> None:
        """In the writer's thread."""
        logger.warning("%s", problem)
        if self._on_warning is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_warning, problem)
