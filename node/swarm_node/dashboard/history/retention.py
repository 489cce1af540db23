"""Limits how much the history keeps and in which detail, and deletes the rest in transactions of milliseconds.

Rows are deleted by age and by detail, and sooner if the database exceeds its size limit. A number over time is kept in
buckets of three widths, wider ones for longer. `tidy` is a generator, so that the writer can write between its steps,
or end it there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Table, delete, func, select

from swarm_node.dashboard.history.schema import (
    contributions,
    happenings,
    nodes,
    presence,
    refusals,
    runs,
    samples,
    series,
    steps,
)
from swarm_node.dashboard.history.store import Store
from swarm_node.formatting import DAY_S

HOUR_S = 3600.0

RAW_S = 5
MINUTE_S = 60
WIDTHS_S = (RAW_S, MINUTE_S, int(HOUR_S))
"""Widths in seconds of a series' buckets. The collector polls every second."""

MAX_SQUEEZE = 10

logger = logging.getLogger(__name__)

_ROWS = 1000
_SERIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionLimits:
    """Limits the history. `max_bytes` is for its content: a SQLite file also has a log of at most about 8 MB.

    Above `max_bytes` all ages are halved repeatedly until the content fits. A run keeps its newest `steps_in_full`
    steps. Whenever there are as many older steps, every second one of these is deleted, so that detail decreases with
    age.
    """

    max_age_s: float = 30 * DAY_S
    max_bytes: int = 256 * 2**20
    raw_age_s: float = 2 * HOUR_S
    minute_age_s: float = 2 * DAY_S
    steps_in_full: int = 1000
    max_refusals: int = 200  # of a run
    max_changes: int = 1000
    max_series: int = 2000

    def ages_s(self, squeeze: int) -> dict[int, float]:
        """Return how long buckets of each width are kept, in seconds. The widest are kept as long as anything else."""
        ages = (self.raw_age_s, self.minute_age_s, self.max_age_s)
        return {width: age / 2**squeeze for width, age in zip(WIDTHS_S, ages, strict=True)}

    def width_s(self, hours: float, squeeze: int = 0) -> int:
        """Return the smallest width in seconds whose buckets still cover the newest `hours`."""
        ages_s = self.ages_s(squeeze)
        return next((width for width, age_s in ages_s.items() if hours * HOUR_S <= age_s), WIDTHS_S[-1])


class Retention:
    """Applies the limits to one store. All ages are divided by 2 ** `squeeze` to keep the store within its size."""

    def __init__(self, store: Store, limits: RetentionLimits) -> None:
        self._store = store
        self._limits = limits
        self.squeeze = 0

    def tidy(self, now: float) -> Iterator[None]:
        """Make one pass. Raises what the database raises; the next pass continues where this one stopped."""
        used, most = self._store.used_bytes(), self._limits.max_bytes
        if used > most and self.squeeze < MAX_SQUEEZE:
            self.squeeze += 1
            days = self._oldest_s() / DAY_S
            logger.warning("the history exceeds %d MiB: it now keeps only %.1f days", most // 2**20, days)
        elif used < most // 4 and self.squeeze:
            self.squeeze -= 1
        yield from self._samples(now)
        yield from self._delete(presence, presence.c.id, presence.c.until < now - self._oldest_s())
        yield from self._runs(now)
        yield from self._refusals(now)
        yield from self._delete(happenings, happenings.c.id, happenings.c.at < now - self._oldest_s())
        yield from self._keep_newest(happenings, self._limits.max_changes)
        unused = (
            ~select(presence.c.id).where(presence.c.node_id == nodes.c.id).exists(),
            ~select(contributions.c.run_id).where(contributions.c.node_id == nodes.c.id).exists(),
        )
        yield from self._delete(nodes, nodes.c.id, *unused)
        self._store.give_back()

    def _oldest_s(self) -> float:
        return self._limits.max_age_s / 2.0**self.squeeze

    def _samples(self, now: float) -> Iterator[None]:
        ages = self._limits.ages_s(self.squeeze)
        with self._store.writing() as connection:
            numbers = connection.scalars(select(series.c.id).order_by(series.c.id)).all()
        for at in range(0, len(numbers), _SERIES):
            with self._store.writing() as connection:
                for number in numbers[at : at + _SERIES]:
                    for width_s, age_s in ages.items():
                        old = samples.c.width_s == width_s, samples.c.bucket < (now - age_s) // width_s
                        connection.execute(delete(samples).where(samples.c.series_id == number, *old))
                    left = select(samples.c.bucket).where(samples.c.series_id == number).exists()
                    connection.execute(delete(series).where(series.c.id == number, ~left))
            yield

    def _runs(self, now: float) -> Iterator[None]:
        oldest = now - self._oldest_s()
        with self._store.writing() as connection:
            found = connection.execute(select(runs.c.id, runs.c.newest_at)).all()
        for run, newest_at in found:
            if newest_at >= oldest:
                yield from self._thin(run)
                continue
            for table in (steps, contributions, refusals):
                column = list(table.primary_key)[-1]
                yield from self._delete(table, column, table.c.run_id == run)
            with self._store.writing() as connection:
                connection.execute(delete(runs).where(runs.c.id == run, runs.c.newest_at < oldest))

    def _thin(self, run: int) -> Iterator[None]:
        """Delete every second older step, once older steps are as many as those kept in full. The first step stays.

        Of two neighbours, one without a validation loss is preferred for deletion.
        """
        full = max(1, self._limits.steps_in_full >> self.squeeze)
        with self._store.writing() as connection:
            columns = steps.c.outer_step, steps.c.validation_loss
            ordered = select(*columns).where(steps.c.run_id == run).order_by(steps.c.outer_step)
            older = connection.execute(ordered).all()[:-full]
        if len(older) < full:
            return
        pairs = [(older[at], older[at + 1]) for at in range(0, len(older) - 1, 2)]
        gone = [
            first.outer_step
            if at and first.validation_loss is None and second.validation_loss is not None
            else second.outer_step
            for at, (first, second) in enumerate(pairs)
        ]
        for at in range(0, len(gone), _ROWS // 2):
            chunk = gone[at : at + _ROWS // 2]
            with self._store.writing() as connection:
                connection.execute(delete(steps).where(steps.c.run_id == run, steps.c.outer_step.in_(chunk)))
            yield

    def _refusals(self, now: float) -> Iterator[None]:
        yield from self._delete(refusals, refusals.c.id, refusals.c.at < now - self._oldest_s())
        with self._store.writing() as connection:
            full = (
                select(refusals.c.run_id).group_by(refusals.c.run_id).having(func.count() > self._limits.max_refusals)
            )
            crowded = connection.scalars(full).all()
        for run in crowded:
            yield from self._keep_newest(refusals, self._limits.max_refusals, refusals.c.run_id == run)

    def _keep_newest(self, table: Table, count: int, *which: ColumnElement[bool]) -> Iterator[None]:
        with self._store.writing() as connection:
            newest = select(table.c.id).where(*which).order_by(table.c.id.desc())
            last = connection.scalar(newest.offset(count).limit(1))
        if last is not None:
            yield from self._delete(table, table.c.id, table.c.id <= last, *which)

    def _delete(self, table: Table, column: ColumnElement[int], *which: ColumnElement[bool]) -> Iterator[None]:
        """Delete the rows that match `which`, in batches. `column` identifies them."""
        is_full = True
        while is_full:
            with self._store.writing() as connection:
                some = select(column).where(*which).limit(_ROWS)
                num = connection.execute(delete(table).where(column.in_(some), *which)).rowcount
            is_full = num >= _ROWS
            yield
