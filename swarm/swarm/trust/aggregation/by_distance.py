"""Aggregators that look for a point near most slices: geometric median and CenteredClip.

Both start at the coordinate median, so that no slice, however far, is in the first point; and both measure lengths in
multiples of the weighted median distance from there, because a run cannot know how long its pseudo-gradients are. Each
point on the way is a combination of the slices and the start, so that products [M, M] are all they need: iterations
cost nothing. If at least half of the weight agrees in every value, that median distance is 0, and the result is theirs.

Memory at the owner: one decoded frame of each member, and the part's encoded slices. Shapes: M members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from swarm.trust.aggregation.aggregator import (
    Aggregator,
    Decision,
    Report,
    Survey,
    bounded,
    distances,
    shares,
    weighted_median,
)
from swarm.trust.aggregation.columns import Doubles, median_cut

_STILL = 1e-7
"""A step by which no coefficient changes more is the last: fp32 has no finer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricMedian(Aggregator):
    """The point with the least weighted sum of distances to the slices, by at most `iterations` of Weiszfeld's, where a
    slice's pull grows no more within `smoothing` (Pillutla et al. 2019, arXiv 1912.13445, algorithm 2, with another
    start and a relative smoothing). Holds while liars have less than half of the weight."""

    name: ClassVar[str] = "geometric_median"
    survey: ClassVar[Survey] = "distances"

    smoothing: float = bounded(1e-4, 1e-9, 1.0)
    iterations: int = bounded(50, 1, 1000)

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> Decision:
        start = distances(survey, (0.0,) * len(weights))
        unit = weighted_median(start, weights)
        if unit == 0:
            return _start_alone(weights, start)
        point, reached = (0.0,) * len(weights), start
        for _ in range(self.iterations):
            pulls = [
                weight / max(self.smoothing * unit, length) for weight, length in zip(weights, reached, strict=True)
            ]
            total = math.fsum(pulls)
            former, point = point, tuple(pull / total for pull in pulls)
            reached = distances(survey, point)
            if _stands_still(former, point):
                break
        return Decision(coefficients=point, report=_report(start, reached, unit))


@dataclass(frozen=True, slots=True, kw_only=True)
class CenteredClip(Aggregator):
    """v <- v + weighted mean of (slice - v) * min(1, tau / |slice - v|), to the fixed point, in at most `iterations`
    (Karimireddy et al. 2021, arXiv 2012.10333, algorithm 2; the start is the coordinate median instead of the last
    result, and tau is `radius` median distances). A liar with share s of the weight moves each step by at most
    s * tau. With a radius of 1 about half of the honest slices are clipped, with the default next to none
    (`tests/bench/test_bench_liars.py`)."""

    name: ClassVar[str] = "centered_clip"
    survey: ClassVar[Survey] = "distances"

    radius: float = bounded(2.0, 0.01, 100.0)
    iterations: int = bounded(50, 1, 1000)

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> Decision:
        start = distances(survey, (0.0,) * len(weights))
        limit = self.radius * weighted_median(start, weights)
        if limit == 0:
            return _start_alone(weights, start)
        fair, point, reached = shares(weights), (0.0,) * len(weights), start
        for _ in range(self.iterations):
            pulls = [
                share * (1.0 if length <= limit else limit / length)
                for share, length in zip(fair, reached, strict=True)
            ]
            stays = 1 - math.fsum(pulls)
            former, point = point, tuple(each * stays + pull for each, pull in zip(point, pulls, strict=True))
            reached = distances(survey, point)
            if _stands_still(former, point):
                break
        return Decision(
            coefficients=point,
            centre=1 - math.fsum(point),
            cut=median_cut(weights),
            report=_report(start, reached, limit),
        )


def _start_alone(weights: Sequence[int], start: Sequence[float]) -> Decision:
    return Decision(
        coefficients=(0.0,) * len(weights),
        centre=1.0,
        cut=median_cut(weights),
        report=Report(norms=tuple(start), kept=tuple(float(length == 0) for length in start)),
    )


def _report(start: Sequence[float], reached: Sequence[float], limit: float) -> Report:
    kept = tuple(1.0 if length <= limit else limit / length for length in reached)
    return Report(norms=tuple(start), kept=kept)


def _stands_still(former: Sequence[float], point: Sequence[float]) -> bool:
    return all(abs(after - before) <= _STILL for before, after in zip(former, point, strict=True))
