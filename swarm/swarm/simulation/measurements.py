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
    num_sampled: list[int] = field(default_factory=list)
    """The nodes of which each sample is taken."""
    sent_a_minute: list[tuple[float, float]] = field(default_factory=list)
    """Messages and bytes of each node that was there at both ends."""

    def add(self, other: Measurements) -> None:
        """Add what another process has measured of the nodes there, in which only means and maxima are sampled."""
        self.counts.update(other.counts)
        self.lookup_hops += other.lookup_hops
        self.lookup_s += other.lookup_s
        self.sent_a_minute += other.sent_a_minute
        for index, (own, more) in enumerate(zip(self.samples, other.samples, strict=True)):
            num_own, num_more = self.num_sampled[index], other.num_sampled[index]
            self.num_sampled[index] = num_own + num_more
            for name, value in more.items():
                if name.endswith("_max"):
                    own[name] = max(own[name], value)
                elif name.endswith("_mean"):
                    own[name] = (own[name] * num_own + value * num_more) / max(1, num_own + num_more)

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


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 if there are no values."""
    return sum(values) / len(values) if values else 0.0


def share(part: float, whole: float) -> float | None:
    """Return the share, or None where there was nothing to take a share of."""
    return part / whole if whole else None
