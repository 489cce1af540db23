"""Defines the facts that the history records, and writes them. The caller provides one transaction for each batch.

The statements suit both databases, and all values are bound parameters. After a rollback and `forget`, the database and
the recorder are as before the batch.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, Table, case, func, insert, literal, select, update
from sqlalchemy.dialects import postgresql, sqlite

from swarm_node.dashboard.history.retention import WIDTHS_S, RetentionLimits
from swarm_node.dashboard.history.schema import (
    bounded,
    collector,
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
from swarm_node.dashboard.views import ChangeEvent, RefusalView, StepView

GAP_S = 600.0
"""The longest gap in seconds between two records of presence. After a longer one it is unknown which nodes joined and
left."""

MAX_PRESENT = 20_000
MAX_MEMBERS = 1024
MAX_WORDS = 1000
MAX_WHOLE = 2**53
MAX_NUMBER = 1e15
MAX_PHASES = 16
_AT_ONCE = 500  # names in one query

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSample:
    """One number of a series, such as `tokens_per_s` or `tokens_per_s/MODEL`."""

    name: str
    unit: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    """A committed outer step of a run. All of `group` count as having had a round and an equal part of its tokens,
    since a certificate has only their sum. `file` is the text of the run's signed file, which is kept once.

    The same step may be recorded again when more is known: contributions are counted once, while `phases_s`, `seconds`,
    `bytes_per_parameter` and `validation_loss` are updated.
    """

    run: str
    group: tuple[str, ...]
    step: StepView
    file: str = ""

    @property
    def at(self) -> float:
        return self.step.at


@dataclass(frozen=True, slots=True)
class PresenceFact:
    """All nodes that are there at `at`. Joins and departures since the last such fact follow from it."""

    at: float
    peer_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class SamplesFact:
    """The values of several series at one time. Those that cannot be drawn are dropped."""

    at: float
    samples: tuple[SeriesSample, ...]


@dataclass(frozen=True, slots=True)
class RefusalFact:
    """A contribution to a run that a member refused. Only the first is kept for each outer step, peer, and peer that
    refused."""

    run: str
    refusal: RefusalView

    @property
    def at(self) -> float:
        return self.refusal.at


Fact = PresenceFact | SamplesFact | StepFact | RefusalFact | ChangeEvent


class FactRecorder:
    """Writes the facts of one database."""

    def __init__(self, limits: RetentionLimits) -> None:
        self._limits = limits
        self._present: dict[str, int] | None = None  # row id of each node that is present
        self._looked_at: float | None = None

    def forget(self) -> None:
        """Drop what was read from the database. Call it after a rollback, and for another database."""
        self._present = None

    def write(self, connection: Connection, facts: Sequence[Fact]) -> None:
        """Write `facts`, except series and peers beyond the limits."""
        for fact in facts:
            match fact:
                case PresenceFact():
                    self._presence(connection, fact)
                case StepFact():
                    self._step(connection, fact)
                case RefusalFact():
                    _refusal(connection, fact)
                case ChangeEvent():
                    words = bounded(fact.words, MAX_WORDS)
                    peer_id = None if fact.peer_id is None else bounded(fact.peer_id)
                    row = {"at": fact.at, "kind": fact.kind, "peer_id": peer_id, "words": words}
                    connection.execute(insert(happenings), row)
                case SamplesFact():
                    pass
        self._samples(connection, [fact for fact in facts if isinstance(fact, SamplesFact)])

    def _presence(self, connection: Connection, seen: PresenceFact) -> None:
        if self._present is None:
            self._looked_at = connection.scalar(select(collector.c.looked_at))
            rows = connection.execute(
                select(nodes.c.peer_id, nodes.c.id).join_from(presence, nodes).where(presence.c.until.is_(None))
            )
            self._present = {row.peer_id: row.id for row in rows}
        present = self._present
        there = {bounded(peer) for peer in seen.peer_ids}
        if len(there) > MAX_PRESENT:
            there = set(sorted(there, key=lambda peer: (peer not in present, peer))[:MAX_PRESENT])
        is_gap = self._looked_at is None or abs(seen.at - self._looked_at) > GAP_S
        if is_gap:
            ended_at = seen.at if self._looked_at is None else min(self._looked_at, seen.at)
            _end(connection, present.values(), ended_at, saw_leave=False)
            present.clear()
        left = [present.pop(peer) for peer in present.keys() - there]
        _end(connection, left, seen.at, saw_leave=True)
        came = _numbers(connection, nodes, "peer_id", there - present.keys())
        new = [
            {"node_id": node, "since": seen.at, "saw_join": not is_gap, "saw_leave": False} for node in came.values()
        ]
        if new:
            connection.execute(insert(presence), new)
        present.update(came)
        self._looked_at = seen.at
        _replace(connection, collector, ["id"], {"id": 1, "looked_at": seen.at})

    def _samples(self, connection: Connection, facts: Sequence[SamplesFact]) -> None:
        sums: dict[tuple[str, int, int], list[float]] = defaultdict(list)
        units: dict[str, str] = {}
        for each in facts:
            for sample in each.samples:
                if finite(sample.value) is None:
                    continue
                name = bounded(sample.name)
                units[name] = bounded(sample.unit, 40)
                for width_s in WIDTHS_S:
                    sums[name, width_s, int(each.at // width_s)].append(sample.value)
        known = self._series(connection, units)
        rows = [
            {"series_id": known[name], "width_s": width_s, "bucket": bucket, "num": len(values), "total": sum(values)}
            for (name, width_s, bucket), values in sums.items()
            if name in known
        ]
        if rows:
            connection.execute(_adding(connection, samples, ["series_id", "width_s", "bucket"], "num", "total"), rows)

    def _series(self, connection: Connection, units: dict[str, str]) -> dict[str, int]:
        known = _known_numbers(connection, series, "name", units)
        new = sorted(units.keys() - known.keys())
        if not new:
            return known
        room = self._limits.max_series - int(connection.scalar(select(func.count()).select_from(series)) or 0)
        taken = new[: max(0, room)]
        for name in taken:
            _replace(connection, series, ["name"], {"name": name, "unit": units[name]})
        return known | _known_numbers(connection, series, "name", taken)

    def _step(self, connection: Connection, fact: StepFact) -> None:
        step = fact.step
        run = _run(connection, fact.run, step.at)
        connection.execute(update(runs).where(runs.c.id == run, runs.c.file.is_(None)).values(file=fact.file or None))
        group = list(dict.fromkeys(map(bounded, fact.group[:MAX_MEMBERS])))
        numbers = _numbers(connection, nodes, "peer_id", group)
        row = {
            "outer_step": whole(step.outer_step),
            "at": step.at,
            "loss": finite(step.loss),
            "digest": bounded(step.digest),
            "num_tokens": whole(step.num_tokens),
            "seconds": finite(step.seconds),
            "phases": phases_text(step.phases_s),
            "bytes_per_parameter": finite(step.bytes_per_parameter),
            "validation_loss": finite(step.validation_loss),
        } | {"run_id": run, "members": json.dumps([numbers[peer] for peer in group])}
        key = (steps.c.run_id == run, steps.c.outer_step == row["outer_step"])
        if connection.scalar(select(steps.c.run_id).where(*key)) is not None:
            late = ("phases", "seconds", "bytes_per_parameter", "validation_loss")
            known = {name: row[name] for name in late if row[name] not in (None, "{}")}
            if known:
                connection.execute(update(steps).where(*key).values(known))
            return
        connection.execute(insert(steps), row)
        tokens = whole(step.num_tokens // max(1, step.num_members))
        parts = [{"run_id": run, "node_id": numbers[peer], "tokens": tokens, "rounds": 1} for peer in group]
        if parts:
            connection.execute(_adding(connection, contributions, ["run_id", "node_id"], "tokens", "rounds"), parts)


def _refusal(connection: Connection, fact: RefusalFact) -> None:
    refusal = fact.refusal
    row = {
        "run_id": _run(connection, fact.run, refusal.at),
        "outer_step": whole(refusal.outer_step),
        "at": refusal.at,
        "peer_id": bounded(refusal.peer_id),
        "name": bounded(refusal.name),
        "by_peer_id": bounded(refusal.by_peer_id),
        "reason": bounded(refusal.reason, MAX_WORDS),
    }
    key = [refusals.c[name] == row[name] for name in ("run_id", "outer_step", "peer_id", "by_peer_id")]
    if connection.scalar(select(refusals.c.id).where(*key)) is None:
        connection.execute(insert(refusals), row)


def _run(connection: Connection, name: str, at: float) -> int:
    """Return the row id of the run, and mark it as active at `at`."""
    bounded_name = bounded(name)
    _replace(connection, runs, ["run"], {"run": bounded_name, "newest_at": at})
    return _known_numbers(connection, runs, "run", [bounded_name])[bounded_name]


def _end(connection: Connection, ended: Iterable[int], at: float, *, saw_leave: bool) -> None:
    """End presences. If the clock was set back, a presence ends no earlier than it began."""
    until = case((presence.c.since > at, presence.c.since), else_=literal(at))
    for numbers in _chunks(sorted(ended)):
        still = (presence.c.node_id.in_(numbers), presence.c.until.is_(None))
        connection.execute(update(presence).where(*still).values(until=until, saw_leave=saw_leave))


def _numbers(connection: Connection, table: Table, name: str, values: Iterable[str]) -> dict[str, int]:
    """Return the row ids of `values`, inserting rows for new ones."""
    wanted = list(values)
    known = _known_numbers(connection, table, name, wanted)
    new = [value for value in wanted if value not in known]
    if new:
        connection.execute(insert(table), [{name: value} for value in new])
    return known | _known_numbers(connection, table, name, new)


def _known_numbers(connection: Connection, table: Table, name: str, values: Iterable[str]) -> dict[str, int]:
    column = table.c[name]
    found: dict[str, int] = {}
    for chunk in _chunks(sorted(values)):
        rows = connection.execute(select(column, table.c.id).where(column.in_(chunk)))
        found.update((value, number) for value, number in rows)
    return found


def _chunks(values: list[_T]) -> Iterable[list[_T]]:
    return (values[at : at + _AT_ONCE] for at in range(0, len(values), _AT_ONCE))


def _dialect_insert(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def _replace(connection: Connection, table: Table, key: list[str], row: dict[str, object]) -> None:
    values = {name: value for name, value in row.items() if name not in key}
    statement = _dialect_insert(connection, table).values(row)
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=values))


def _adding(connection: Connection, table: Table, key: list[str], *sums: str) -> postgresql.Insert | sqlite.Insert:
    """Return an insert that adds to the row if it exists."""
    statement = _dialect_insert(connection, table)
    added = {name: table.c[name] + statement.excluded[name] for name in sums}
    return statement.on_conflict_do_update(index_elements=key, set_=added)


def whole(number: int) -> int:
    """Clip `number` to what a database can add up without overflow."""
    return max(-MAX_WHOLE, min(number, MAX_WHOLE))


def finite(number: float | None) -> float | None:
    """Return `number`, or None if it is not finite or too large to be drawn."""
    return number if number is not None and math.isfinite(number) and abs(number) <= MAX_NUMBER else None


def phases_text(phases_s: Mapping[str, float]) -> str:
    """Return at most `MAX_PHASES` durations as JSON."""
    known = {bounded(name, 40): finite(seconds) for name, seconds in list(phases_s.items())[:MAX_PHASES]}
    return json.dumps({name: seconds for name, seconds in known.items() if seconds is not None})
