"""Values that the history records and reports, and how they are made fit for a database. Values only.

Texts may be hostile: `bounded` cuts them where they are stored. What a text means is not judged: it is only ever a
bound parameter, and who shows it escapes it. Times are Unix seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm_protocol.errors import SwarmError

from swarm_node.dashboard.views import ChangeEvent, RefusalView, StepView

MAX_NAME = 256
MAX_WORDS = 1000
MAX_WHOLE = 2**53
MAX_NUMBER = 1e15
MAX_PHASES = 16
_DIGEST = 16


class HistoryError(SwarmError):
    """The database cannot be used now. The history goes on in memory; only a read can raise it to the caller."""

    code = "history"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSample:
    """One number of a series, for example `tokens_per_s` or `tokens_per_s/MODEL`. What is not finite is dropped."""

    name: str
    unit: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    """A committed outer step of a run. `tokens` is by peer id, where known; all of `group` count as having had a round.

    The same step may be recorded again, once more is known of it: contributions are counted once, `phases_s`,
    `seconds`, `bytes_per_parameter` and `validation_loss` are replaced where they are now known.
    """

    run: str
    group: tuple[str, ...]
    step: StepView
    tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionTotal:
    """Holds what `peer_id` contributed to the committed steps of one run, or of all, that this dashboard has seen."""

    peer_id: str
    tokens: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnover:
    """Arrivals and departures that were seen; what was there when the dashboard started has not arrived.

    `since` is the time (Unix seconds) of the first sight of any node; None: nothing was seen yet.
    """

    joins: int
    leaves: int
    since: float | None = None


@dataclass(frozen=True, slots=True)
class PresenceFact:
    """All nodes that are there at `at`."""

    at: float
    peer_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class SamplesFact:
    """The values of several series at one time."""

    at: float
    samples: tuple[SeriesSample, ...]


@dataclass(frozen=True, slots=True)
class RefusalFact:
    """A contribution to a run that a member refused."""

    run: str
    refusal: RefusalView


Fact = PresenceFact | SamplesFact | StepFact | RefusalFact | ChangeEvent


def bounded(text: str, limit: int = MAX_NAME) -> str:
    """Cut `text` to at most `limit` characters, ending in a digest of the whole. Fitting text stays as it is.

    PostgreSQL takes no zero character, and neither database half a surrogate pair: they become question marks.
    """
    if len(text) <= limit and text.isascii() and "\0" not in text:
        return text
    clean = text.replace("\0", "?").encode("utf-8", "replace").decode("utf-8")
    if len(clean) <= limit:
        return clean
    digest = hashlib.sha256(clean.encode()).hexdigest()[:_DIGEST]
    return f"{clean[: limit - _DIGEST - 1]}…{digest}"


def whole(number: int) -> int:
    """Clip `number` to what a database adds up without overflow."""
    return max(-MAX_WHOLE, min(number, MAX_WHOLE))


def finite(number: float | None) -> float | None:
    """Return `number`, or None if it cannot be drawn."""
    return number if number is not None and math.isfinite(number) and abs(number) <= MAX_NUMBER else None


def phases_text(phases_s: Mapping[str, float]) -> str:
    """Return JSON of at most `MAX_PHASES` durations."""
    known = {bounded(name, 40): finite(seconds) for name, seconds in list(phases_s.items())[:MAX_PHASES]}
    return json.dumps({name: seconds for name, seconds in known.items() if seconds is not None})
