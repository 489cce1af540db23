"""What the history is told, and what it alone can tell. Values only.

Texts may be hostile: they are cut where they are stored (see `texts`). Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm_protocol.errors import SwarmError


class HistoryError(SwarmError):
    """The database cannot be used now. The history goes on in memory; only a read can raise it to the caller."""

    code = "history"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number of a series, for example `tokens_per_s` or `tokens_per_s/MODEL`. What is not finite is dropped."""

    name: str
    unit: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A committed outer step of a run. `tokens` is by peer id, where known; all of `group` count as having had a round.

    The same step may be recorded again, once more is known of it: contributions are counted once, `phases_s`,
    `seconds`, `bytes_per_parameter` and `validation_loss` are replaced where they are now known.
    """

    run: str
    outer_step: int
    at: float
    loss: float
    digest: str
    group: tuple[str, ...]
    num_tokens: int
    tokens: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    bytes_per_parameter: float | None = None
    validation_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Of `peer_id` to the committed steps of one run, or of all, that this dashboard has seen."""

    peer_id: str
    tokens: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnover:
    """Arrivals and departures that were seen; what was there when the dashboard started has not arrived."""

    joins: int
    leaves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStatus:
    """`problem` says why the history is in memory only, None while it is in its database.

    `num_dropped` counts what was recorded and forgotten because the database was slow or away.
    """

    place: str
    problem: HistoryError | None
    num_waiting: int
    num_dropped: int
