"""The aggregators: how an owner combines the members' slices of a leaf, as mean, trimmed, clipped or by distance.

Each is a class here, or in a module of its own, with its place in `_AGGREGATORS` and a row in the tests' table; what it
has to be is said in `aggregator`. Robustness holds by weight (tokens that the round has granted), except where an
aggregator says that it counts members. Shapes: M members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from swarm.trust.aggregator import (
    AggregationDecision,
    AggregationReport,
    Aggregator,
    Survey,
    bounded,
    distances,
    parameter_fields,
    shares,
    weighted_median,
)
from swarm.trust.flag_aggregator import FlagAggregator
from swarm.trust.kernels import Doubles, median_cut
from swarm.trust.mixing import Mixing

_STILL = 1e-7
"""The iteration ends when no coefficient changes by more: fp32 resolves no less."""
FROM_THE_GROUP = -1
"""The number of liars that means: as many as are fewer than a third of those that contribute. Votes hold with no
more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Aggregator):
    """The weighted mean. One liar moves it anywhere. Memory: one decoded frame."""

    name: ClassVar[str] = "mean"
    survey: ClassVar[Survey] = "nothing"

    def decide(self, weights: Sequence[int], _survey: Doubles, /) -> AggregationDecision:
        return AggregationDecision(coefficients=shares(weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormClippedMean(Aggregator):
    """The weighted mean of slices that are scaled down to `ratio` times their weighted median norm.

    Bounds how far a liar moves the result, not where to: liars with share s move it by up to s * ratio * median norm.
    If at least half of the weight sends zeros, the result is zero. Memory: one decoded frame, and the part's encoded
    slices, because norms are known only when all have come.
    """

    name: ClassVar[str] = "norm_clipped_mean"
    survey: ClassVar[Survey] = "norms"

    ratio: float = bounded(1.0, 0.1, 10.0)

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> AggregationDecision:
        norms = tuple(survey.tolist())
        limit = self.ratio * weighted_median(norms, weights)
        kept = tuple(1.0 if norm <= limit else limit / norm for norm in norms)
        return AggregationDecision(
            coefficients=tuple(share * each for share, each in zip(shares(weights), kept, strict=True)),
            report=AggregationReport(kept=kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrum(Aggregator):
    """The weighted mean of all but the `liars` slices that are farthest from their nearest others (Blanchard et al.
    2017, arXiv 1703.02757, section 4): a slice's score is the sum of its squared distances to the M - liars - 2
    nearest others, and the M - liars lowest scores stay. Equal scores: the earlier member stays.

    It counts members, not tokens, so admission must ensure that a liar is one member. The guarantee needs
    M >= 2 liars + 3. If fewer contribute, as many liars as their number allows are left out, and the report says so:
    refusing would stop a run for good when members leave. Memory: one decoded frame of each member, and the part's
    encoded slices.
    """

    name: ClassVar[str] = "multi_krum"
    survey: ClassVar[Survey] = "distances"

    liars: int = bounded(FROM_THE_GROUP, FROM_THE_GROUP, 126)

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> AggregationDecision:
        num_members = len(weights)
        wanted = (num_members - 1) // 3 if self.liars == FROM_THE_GROUP else self.liars
        liars = min(wanted, max(0, (num_members - 3) // 2))
        note = (
            f"{liars} liars are left out instead of {wanted}, because only {num_members} members contribute"
            if liars < wanted
            else ""
        )
        scores = [_score(survey, member, num_members - liars - 2) for member in range(num_members)]
        order = sorted(range(num_members), key=lambda member: (scores[member], member))
        selected = set(order[: num_members - liars])
        chosen = [weight if member in selected else 0 for member, weight in enumerate(weights)]
        return AggregationDecision(
            coefficients=shares(chosen),
            report=AggregationReport(kept=tuple(float(member in selected) for member in range(num_members)), note=note),
        )

    def fewest_members(self) -> int:
        liars = 1 if self.liars == FROM_THE_GROUP else self.liars
        return 2 * liars + 3 if liars else 1


def _score(products_MM: Doubles, member: int, num_nearest: int) -> float:
    own_M, cross_M = products_MM.diagonal().tolist(), products_MM[member].tolist()
    squares = sorted(
        max(0.0, math.fsum((own_M[member], own_M[other], -2 * cross_M[other])))
        for other in range(len(own_M))
        if other != member
    )
    return math.fsum(squares[: max(0, num_nearest)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedian(Aggregator):
    """The weighted median of each coordinate; the middle of both where two share it (Yin et al. 2018, arXiv 1803.01498,
    definition 1, there without weights). It is robust while liars have less than half of the weight. Memory: one
    decoded frame of each member, and a few blocks."""

    name: ClassVar[str] = "median"
    survey: ClassVar[Survey] = "nothing"

    def decide(self, weights: Sequence[int], _survey: Doubles, /) -> AggregationDecision:
        return AggregationDecision(coefficients=(0.0,) * len(weights), centre=1.0, cut=median_cut(weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean(Aggregator):
    """The mean of each coordinate without the lowest and highest `trim` of the weight (Yin et al. 2018,
    arXiv 1803.01498, definition 2, there without weights).

    A member at the edge of the cut counts with the rest of its weight. The mean is robust while liars have at most
    `trim` of the weight. Memory: one decoded frame of each member, and a few blocks."""

    name: ClassVar[str] = "trimmed_mean"
    survey: ClassVar[Survey] = "nothing"

    trim: float = bounded(0.34, 0.0, 0.49)

    def decide(self, weights: Sequence[int], _survey: Doubles, /) -> AggregationDecision:
        cut = min(math.ceil(self.trim * sum(weights)), median_cut(weights))
        return AggregationDecision(coefficients=(0.0,) * len(weights), centre=1.0, cut=cut)


# Aggregators that look for a point near most slices start at the coordinate median, so that no slice, however far, is
# in the first point; among mixed slices they start at the medoid, which costs nothing as it is a combination of slices.
# They measure lengths in multiples of the weighted median distance from there, because a run cannot know how long its
# pseudo-gradients are. Each point on the way is a combination of the slices and the start, so that products [M, M] are
# all they need, and iterations cost nothing. If at least half of the weight agrees in every value, that median distance
# is 0, and these slices are the result. Memory: one decoded frame of each member, and the part's encoded slices.


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricMedian(Aggregator):
    """The point with the least weighted sum of distances to the slices, by at most `iterations` of Weiszfeld's
    algorithm. Within `smoothing`, a slice's weight grows no more (Pillutla et al. 2019, arXiv 1912.13445, algorithm 2,
    with another start and a relative smoothing). It is robust while liars have less than half of the weight."""

    name: ClassVar[str] = "geometric_median"
    survey: ClassVar[Survey] = "distances"

    smoothing: float = bounded(1e-4, 1e-9, 1.0)
    iterations: int = bounded(50, 1, 1000)

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> AggregationDecision:
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
        return AggregationDecision(coefficients=point, report=_report(reached, unit))


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

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> AggregationDecision:
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
        return AggregationDecision(
            coefficients=point, centre=1 - math.fsum(point), cut=median_cut(weights), report=_report(reached, limit)
        )


def _start_alone(weights: Sequence[int], start: Sequence[float]) -> AggregationDecision:
    return AggregationDecision(
        coefficients=(0.0,) * len(weights),
        centre=1.0,
        cut=median_cut(weights),
        report=AggregationReport(kept=tuple(float(length == 0) for length in start)),
    )


def _report(reached: Sequence[float], limit: float) -> AggregationReport:
    return AggregationReport(kept=tuple(1.0 if length <= limit else limit / length for length in reached))


def _stands_still(former: Sequence[float], point: Sequence[float]) -> bool:
    return all(abs(after - before) <= _STILL for before, after in zip(former, point, strict=True))


_AGGREGATORS: dict[str, type[Aggregator]] = {
    kind.name: kind
    for kind in (
        Mean,
        NormClippedMean,
        CoordinateMedian,
        TrimmedMean,
        GeometricMedian,
        CenteredClip,
        MultiKrum,
        FlagAggregator,
    )
}


def aggregator_names() -> tuple[str, ...]:
    return tuple(_AGGREGATORS)


def parameter_names(name: str) -> tuple[str, ...]:
    """Return the parameters of the aggregator `name`, which is in `aggregator_names()`."""
    return tuple(each.name for each in parameter_fields(_AGGREGATORS[name]))


def get_aggregator(name: str, parameters: Mapping[str, float], mixing: Mixing | None = None) -> Aggregator:
    """Return the aggregator `name`, which is in `aggregator_names()`, of slices that `mixing` mixes. `parameters`
    replace its defaults. Raises ValueError."""
    if unknown := [key for key in parameters if key not in parameter_names(name)]:
        raise ValueError(f"{name} has no parameter {unknown[0]!r}: it has {', '.join(parameter_names(name)) or 'none'}")
    kind: Any = _AGGREGATORS[name]
    made: Aggregator = kind(mixing=mixing, **parameters)
    return made


def parameters_of(aggregator: Aggregator) -> dict[str, float]:
    """Return all parameters: counts as whole numbers and all others as floats, so that equal settings have equal
    bytes."""
    found = ((each, getattr(aggregator, each.name)) for each in parameter_fields(type(aggregator)))
    return {each.name: value if isinstance(each.default, int) else float(value) for each, value in found}
