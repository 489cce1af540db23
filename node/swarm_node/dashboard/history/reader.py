"""Reads the history as views. The caller provides the transaction. All results are bounded, whatever the tables
hold."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy import ColumnElement, Connection, func, select
from swarm.training.run.signed_run import SignedRun, parse_signed_run
from swarm_protocol.errors import SwarmError

from swarm_node.dashboard.history.retention import HOUR_S, RetentionLimits
from swarm_node.dashboard.history.schema import (
    bounded,
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
from swarm_node.dashboard.views import ChangeEvent, PresenceView, RefusalView, Series, StepView

MAX_STEPS = 500
MAX_PRESENCES = 500
MAX_CONTRIBUTORS = MAX_CONTRIBUTED = 1000
MAX_REFUSALS = 100
MAX_CHANGES = 20
MAX_RUNS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionTotal:
    """Holds what `peer_id` contributed to the committed steps of one run that this dashboard has seen."""

    peer_id: str
    tokens: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnover:
    """Joins and departures that were seen. A node that was there when the dashboard started has not joined.

    `since` is the Unix time at which any node was first seen. None means that no node was seen yet.
    """

    joins: int
    leaves: int
    since: float | None = None


def read_presence(connection: Connection, peer_id: str, since: float) -> tuple[PresenceView, ...]:
    """Return the newest times of presence, oldest first, cut off at `since`."""
    found = connection.execute(
        select(presence.c.since, presence.c.until)
        .join_from(presence, nodes)
        .where(nodes.c.peer_id == bounded(peer_id), presence.c.until.is_(None) | (presence.c.until > since))
        .order_by(presence.c.since.desc())
        .limit(MAX_PRESENCES)
    )
    return tuple(PresenceView(since=max(row.since, since), until=row.until) for row in reversed(found.all()))


def read_turnover(connection: Connection, since: float) -> Turnover:
    def count(*which: ColumnElement[bool]) -> int:
        return int(connection.scalar(select(func.count()).select_from(presence).where(*which)) or 0)

    return Turnover(
        joins=count(presence.c.since >= since, presence.c.saw_join),
        leaves=count(presence.c.until >= since, presence.c.saw_leave),
        since=connection.scalar(select(func.min(presence.c.since))),
    )


def read_series(
    connection: Connection, name: str, hours: float, now: float, limits: RetentionLimits, squeeze: int = 0
) -> Series | None:
    """Return averages over time, or None for a name without values in the whole history. `squeeze` is
    `Retention.squeeze`."""
    hours = min(max(hours, 1 / 60), limits.max_age_s / HOUR_S)
    found = connection.execute(select(series).where(series.c.name == bounded(name))).one_or_none()
    if found is None:
        return None
    width_s = limits.width_s(hours, squeeze)
    first, last = int((now - hours * HOUR_S) // width_s), int(now // width_s)
    rows = connection.execute(
        select(samples.c.bucket, samples.c.total / samples.c.num).where(
            samples.c.series_id == found.id, samples.c.width_s == width_s, samples.c.bucket.between(first, last)
        )
    )
    means = {bucket: mean for bucket, mean in rows}  # noqa: C416 - a result is no iterable of pairs to mypy
    values = tuple(means.get(bucket) for bucket in range(first, last + 1))
    return Series(name=name, unit=found.unit, start=float(first * width_s), step_s=float(width_s), values=values)


def read_steps(connection: Connection, run: str, limit: int) -> tuple[StepView, ...]:
    """Return steps evenly chosen by number, oldest first.

    The first and the last are included. Among the others, steps with a validation loss are preferred.
    """
    of_run = select(steps).join_from(steps, runs).where(runs.c.run == bounded(run))
    columns = steps.c.outer_step, steps.c.validation_loss
    kept = connection.execute(of_run.with_only_columns(*columns).order_by(steps.c.outer_step)).all()
    is_validated = [row.validation_loss is not None for row in kept]
    chosen = [kept[at].outer_step for at in evenly(is_validated, min(limit, MAX_STEPS))]
    rows = connection.execute(of_run.where(steps.c.outer_step.in_(chosen)).order_by(steps.c.outer_step)).all()
    return tuple(
        StepView.of(
            row,
            loss=math.nan if row.loss is None else row.loss,
            num_members=len(json.loads(row.members)),
            phases_s=json.loads(row.phases),
        )
        for row in rows
    )


def evenly(is_preferred: Sequence[bool], limit: int) -> list[int]:
    """Return at most `limit` evenly spaced indices in order, including both ends.

    Near each even place the first preferred index is chosen.
    """
    count = len(is_preferred)
    if count <= limit or limit < 2:
        return list(range(max(0, count - limit), count))
    ends = [round(at * (count - 1) / (limit - 1)) for at in range(limit)]
    inner = (range(place, following) for place, following in pairwise(ends[1:]))
    return [0, *(next((at for at in near if is_preferred[at]), near[0]) for near in inner), count - 1]


def read_run(connection: Connection, run: str) -> SignedRun | None:
    """Return the run's signed file, or None if it is unknown or invalid for this version of Swarm."""
    file = connection.scalar(select(runs.c.file).where(runs.c.run == bounded(run)))
    with suppress(SwarmError):
        return parse_signed_run(file.encode(), "the history") if file else None
    return None


def read_runs(connection: Connection) -> tuple[str, ...]:
    """Return the ids of the runs whose steps or refusals were recorded last, the last first."""
    return tuple(connection.scalars(select(runs.c.run).order_by(runs.c.newest_at.desc()).limit(MAX_RUNS)))


def read_contributions(connection: Connection, run: str) -> tuple[ContributionTotal, ...]:
    rows = connection.execute(
        select(nodes.c.peer_id, contributions.c.tokens, contributions.c.rounds)
        .join_from(contributions, nodes)
        .join(runs)
        .where(runs.c.run == bounded(run))
        .order_by(contributions.c.tokens.desc(), contributions.c.rounds.desc(), nodes.c.peer_id)
        .limit(MAX_CONTRIBUTORS)
    )
    return tuple(ContributionTotal(peer_id=row.peer_id, tokens=row.tokens, rounds=row.rounds) for row in rows)


def read_contributions_of(connection: Connection, peer_id: str) -> dict[str, ContributionTotal]:
    """Return a peer's totals by run, of the runs to which it contributed most."""
    rows = connection.execute(
        select(runs.c.run, contributions.c.tokens, contributions.c.rounds)
        .join_from(contributions, nodes)
        .join(runs)
        .where(nodes.c.peer_id == bounded(peer_id))
        .order_by(contributions.c.tokens.desc(), runs.c.run)
        .limit(MAX_CONTRIBUTED)
    )
    return {row.run: ContributionTotal(peer_id=peer_id, tokens=row.tokens, rounds=row.rounds) for row in rows}


def read_refusals(connection: Connection, run: str) -> tuple[RefusalView, ...]:
    rows = connection.execute(
        select(*(refusals.c[name] for name in RefusalView.model_fields))
        .join_from(refusals, runs)
        .where(runs.c.run == bounded(run))
        .order_by(refusals.c.at.desc(), refusals.c.id.desc())
        .limit(MAX_REFUSALS)
    )
    return tuple(RefusalView.model_validate(dict(row)) for row in rows.mappings())


def read_changes(connection: Connection) -> tuple[ChangeEvent, ...]:
    """Return the changes that were recorded last, the last first.

    They are ordered by recording, not by time, since a clock may have been ahead.
    """
    rows = connection.execute(
        select(*(happenings.c[name] for name in ChangeEvent.model_fields))
        .order_by(happenings.c.id.desc())
        .limit(MAX_CHANGES)
    )
    return tuple(ChangeEvent.model_validate(dict(row)) for row in rows.mappings())
