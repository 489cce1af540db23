"""How much the history keeps, and in which detail.

A number over time is kept in buckets of three widths at once, each for as long as somebody would look at it so closely.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.errors import ConfigError

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

RAW_S = 5
MINUTE_S = 60
WIDTHS_S = (RAW_S, MINUTE_S, int(HOUR_S))
"""Of the buckets of a series. The collector looks about every 5 s."""

MAX_SQUEEZE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`max_bytes` is of the database's content; a SQLite file is that plus a log of at most about 8 MB beside it.

    Above it, all ages halve, and again, until it fits. A run keeps its newest `steps_in_full` steps; of older ones
    every second goes whenever there are as many again, so that the detail fades with age.
    """

    max_age_s: float = 30 * DAY_S
    max_bytes: int = 256 * 2**20
    raw_age_s: float = 2 * HOUR_S
    minute_age_s: float = 2 * DAY_S
    steps_in_full: int = 1000
    max_refusals: int = 200  # of a run
    max_happenings: int = 1000
    max_series: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.raw_age_s <= self.minute_age_s <= self.max_age_s:
            raise ConfigError(
                "a history keeps raw values no longer than minutes, and those no longer than all",
                remedy="order its ages so",
            )
        if self.max_bytes < 2**20 or min(self.steps_in_full, self.max_refusals, self.max_happenings) < 1:
            raise ConfigError("a history this small keeps nothing", remedy="give it at least 1 MiB and one of each")

    def ages_s(self, squeeze: int) -> dict[int, float]:
        """How long buckets of each width are kept; the widest as long as anything else."""
        ages = (self.raw_age_s, self.minute_age_s, self.max_age_s)
        return {width: age / 2**squeeze for width, age in zip(WIDTHS_S, ages, strict=True)}

    def width_s(self, hours: float) -> int:
        """Of the finest buckets that still hold the newest `hours`, and are not more than a chart can show."""
        if hours * HOUR_S <= self.raw_age_s:
            return RAW_S
        return MINUTE_S if hours * HOUR_S <= self.minute_age_s else int(HOUR_S)
