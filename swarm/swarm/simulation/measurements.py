"""Holds what a simulation counts while it runs, and the distributions that its report tells. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Measurements:
    """Everything is of the measured time only; `is_on` is False during the warm-up.

    `samples` are one a minute: what was so then, by name. The other lists have one entry for each event.
    """

    is_on: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    lookup_hops: list[float] = field(default_factory=list)
    lookup_s: list[float] = field(default_factory=list)
    find_group_s: list[float] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    answer_tokens_per_s: list[float] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)

    def count(self, what: str, number: float = 1) -> None:
        if self.is_on:
            self.counts[what] += number  # type: ignore[assignment]

    def take(self, values: list[float], value: float) -> None:
        if self.is_on:
            values.append(value)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the mean, the median, 99th percentile and extremes; empty if there are no values."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "mean": sum(ordered) / len(ordered),
        "min": ordered[0],
        "median": ordered[round(0.5 * last)],
        "p99": ordered[round(0.99 * last)],
        "max": ordered[last],
    }


def share(part: float, whole: float) -> float | None:
    """Return the share, or None where there was nothing to take a share of."""
    return part / whole if whole else None
