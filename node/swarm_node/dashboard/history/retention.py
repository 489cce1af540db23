"""Forgets: by age, by detail, and, when the database is above its bound, sooner. In transactions of milliseconds.

`tidy` is a generator so that the writer can write between two of its steps, and be ended there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from sqlalchemy import ColumnElement, Connection, Table, delete, func, select

from swarm_node.dashboard.history.retention_limits import MAX_SQUEEZE, Bounds
from swarm_node.dashboard.history.store import Store
from swarm_node.dashboard.history.tables import (
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

logger = logging.getLogger(__name__)

_ROWS = 1000
_SERIES = 20


class Retention:
    """Of one store. `squeeze` is how often all ages are halved to keep it within its bytes."""

    def __init__(self, store: Store, bounds: Bounds) -> None:
        self._store = store
        self._bounds = bounds
        self.squeeze = 0

    def tidy(self, now: float) -> Iterator[None]:
        """One pass. Raises what the database raises; the next pass does what this one left."""
        self._adjust()
        for step in (self._samples, self._presence, self._runs, self._refusals, self._happenings, self._nodes):
            yield from step(now)
        self._store.give_back()

    def _adjust(self) -> None:
        used, most = self._store.used_bytes(), self._bounds.max_bytes
        if used > most and self.squeeze < MAX_SQUEEZE:
            self.squeeze += 1
            days = self._oldest_s() / 86_400
            logger.warning("the history is above its %d MiB: it keeps %.1f days now", most // 2**20, days)
        elif used < most // 4 and self.squeeze:
            self.squeeze -= 1

    def _oldest_s(self) -> float:
        return self._bounds.max_age_s / 2.0**self.squeeze

    def _samples(self, now: float) -> Iterator[None]:
        ages = self._bounds.ages_s(self.squeeze)
        with self._store.writing() as connection:
            numbers = connection.scalars(select(series.c.id).order_by(series.c.id)).all()
        for at in range(0, len(numbers), _SERIES):
            with self._store.writing() as connection:
                for number in numbers[at : at + _SERIES]:
                    _forget_samples(connection, number, {width: now - age for width, age in ages.items()})
            yield

    def _presence(self, now: float) -> Iterator[None]:
        yield from self._delete(presence, presence.c.id, presence.c.until < now - self._oldest_s())

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
        """Of each two neighbours among the older steps one goes, rather one that was not validated, whenever they are
        as many as those kept in full; the first stays."""
        full = max(1, self._bounds.steps_in_full >> self.squeeze)
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
                select(refusals.c.run_id).group_by(refusals.c.run_id).having(func.count() > self._bounds.max_refusals)
            )
            crowded = connection.scalars(full).all()
        for run in crowded:
            yield from self._keep_newest(refusals, self._bounds.max_refusals, refusals.c.run_id == run)

    def _happenings(self, now: float) -> Iterator[None]:
        yield from self._delete(happenings, happenings.c.id, happenings.c.at < now - self._oldest_s())
        yield from self._keep_newest(happenings, self._bounds.max_happenings)

    def _nodes(self, _: float) -> Iterator[None]:
        """Those that no presence and no contribution speaks of."""
        unused = (
            ~select(presence.c.id).where(presence.c.node_id == nodes.c.id).exists(),
            ~select(contributions.c.run_id).where(contributions.c.node_id == nodes.c.id).exists(),
        )
        yield from self._delete(nodes, nodes.c.id, *unused)

    def _keep_newest(self, table: Table, count: int, *which: ColumnElement[bool]) -> Iterator[None]:
        with self._store.writing() as connection:
            newest = select(table.c.id).where(*which).order_by(table.c.id.desc())
            last = connection.scalar(newest.offset(count).limit(1))
        if last is not None:
            yield from self._delete(table, table.c.id, table.c.id <= last, *which)

    def _delete(self, table: Table, column: ColumnElement[int], *which: ColumnElement[bool]) -> Iterator[None]:
        """`column` tells the rows of `which` apart."""
        is_full = True
        while is_full:
            with self._store.writing() as connection:
                some = select(column).where(*which).limit(_ROWS)
                num = connection.execute(delete(table).where(column.in_(some), *which)).rowcount
            is_full = num >= _ROWS
            yield


def _forget_samples(connection: Connection, number: int, oldest: dict[int, float]) -> None:
    """And the series itself, once nothing is left of it."""
    for width_s, at in oldest.items():
        old = (samples.c.series_id == number, samples.c.width_s == width_s, samples.c.bucket < at // width_s)
        connection.execute(delete(samples).where(*old))
    left = select(samples.c.bucket).where(samples.c.series_id == number).exists()
    connection.execute(delete(series).where(series.c.id == number, ~left))
