"""The aggregators: how an owner combines the members' slices of a leaf, as mean, trimmed, clipped or by distance.

Each aggregator is a class here, or in a module of its own, and is listed in `_AGGREGATORS` and in the tests' table.
`aggregator` defines the interface. Robustness holds by weight (tokens that the round has granted), except where an
aggregator says that it counts members. Shapes: L leaves, M members, R leaves whose iteration goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm.trust.aggregator import (
    AggregationDecision,
    Aggregator,
    Survey,
    bounded,
    decided_sum,
    distances,
    parameter_fields,
    shares,
    weighted_median,
)
from swarm.trust.flag_aggregator import FlagAggregator
from swarm.trust.kernels import Doubles, Whole, ordered_sum, squared_distances
from swarm.trust.mixing import Mixing

_STILL = 1e-7
"""The iteration for a leaf ends when none of its coefficients changes by more, about the resolution of fp32."""
_NO_REST = 1e-12
"""A smaller share of the start comes from rounding in a sum of shares, and is taken as zero."""
FROM_THE_GROUP = -1
"""A value of `liars` that stands for the most that are fewer than a third of the contributing members. Votes do not
hold with more liars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Aggregator):
    """The weighted mean. One liar can move the result anywhere. Memory: one decoded frame."""

    name: ClassVar[str] = "mean"
    survey: ClassVar[Survey] = "nothing"

    def decide(self, weight_LM: Whole, _survey: Doubles, /) -> AggregationDecision:
        return decided_sum(shares(weight_LM))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormClippedMean(Aggregator):
    """The weighted mean of slices that are scaled down to `ratio` times their weighted median norm.

    It bounds how far liars move the result, but not in which direction: liars with share s of the weight move it by up
    to s * ratio * median norm. If members with at least half of the weight send zeros, the result is zero. Memory: one
    decoded frame, and the part's encoded slices, because the norms are known only once all slices have come.
    """

    name: ClassVar[str] = "norm_clipped_mean"
    survey: ClassVar[Survey] = "norms"

    ratio: float = bounded(1.0, 0.1, 10.0)

    def decide(self, weight_LM: Whole, survey: Doubles, /) -> AggregationDecision:
        kept_LM = _within(survey, self.ratio * weighted_median(survey, weight_LM))
        return decided_sum(shares(weight_LM) * kept_LM, kept_LM)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrum(Aggregator):
    """The weighted mean of all but the `liars` slices that are farthest from their nearest others (Blanchard et al.
    2017, arXiv 1703.02757, section 4): a slice's score is the sum of its squared distances to the M - liars - 2
    nearest others, and the M - liars lowest scores stay. Equal scores: the earlier member stays.

    It counts members, not tokens, so admission must ensure that a liar is only one member. The guarantee needs M >= 2
    liars + 3. If fewer members contribute, fewer slices are left out, and the report says so: refusing would stop a run
    for good when members leave. Memory: one decoded frame of each member, and the part's encoded slices.
    """

    name: ClassVar[str] = "multi_krum"
    survey: ClassVar[Survey] = "distances"

    liars: int = bounded(FROM_THE_GROUP, FROM_THE_GROUP, 126)

    def decide(self, weight_LM: Whole, survey: Doubles, /) -> AggregationDecision:
        num_members = weight_LM.shape[1]
        wanted = (num_members - 1) // 3 if self.liars == FROM_THE_GROUP else self.liars
        liars = min(wanted, max(0, (num_members - 3) // 2))
        note = (
            f"{liars} liars are left out instead of {wanted}, because only {num_members} members contribute"
            if liars < wanted
            else ""
        )
        order_LM = np.argsort(_scores(survey, num_members - liars - 2), axis=1, kind="stable")
        kept_LM = np.ones(weight_LM.shape)
        np.put_along_axis(kept_LM, order_LM[:, num_members - liars :], 0.0, axis=1)
        return decided_sum(shares(np.where(kept_LM > 0, weight_LM, 0)), kept_LM, note)

    def fewest_members(self) -> int:
        liars = 1 if self.liars == FROM_THE_GROUP else self.liars
        return 2 * liars + 3 if liars else 1


def _scores(products_LMM: Doubles, num_nearest: int) -> Doubles:
    """Return the sum of the squared distances from each slice to its `num_nearest` nearest others [L, M]."""
    square_LMM = squared_distances(products_LMM)
    member_M = np.arange(square_LMM.shape[1])
    square_LMM[:, member_M, member_M] = -1.0  # a slice is its own nearest, and not counted
    return ordered_sum(np.sort(square_LMM, axis=2)[:, :, 1 : 1 + max(0, num_nearest)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedian(Aggregator):
    """The weighted median of each coordinate, or the mean of the two middle values where there are two (Yin et al.
    2018, arXiv 1803.01498, definition 1, there without weights). It is robust while liars have less than half of the
    weight. Memory: one decoded frame of each member, and a few blocks."""

    name: ClassVar[str] = "median"
    survey: ClassVar[Survey] = "nothing"

    def decide(self, weight_LM: Whole, _survey: Doubles, /) -> AggregationDecision:
        return _centre_alone(weight_LM, _median_cut(weight_LM))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean(Aggregator):
    """The mean of each coordinate without the lowest and highest `trim` of the weight (Yin et al. 2018,
    arXiv 1803.01498, definition 2, there without weights).

    A member at the edge of the cut counts with the rest of its weight. The mean is robust while liars have at most
    `trim` of the weight. Memory: one decoded frame of each member, and a few blocks."""

    name: ClassVar[str] = "trimmed_mean"
    survey: ClassVar[Survey] = "nothing"

    trim: float = bounded(0.34, 0.0, 0.49)

    def decide(self, weight_LM: Whole, _survey: Doubles, /) -> AggregationDecision:
        cut_L = np.ceil(self.trim * weight_LM.sum(axis=1)).astype(np.int64)
        return _centre_alone(weight_LM, np.minimum(cut_L, _median_cut(weight_LM)))


def _median_cut(weight_LM: Whole) -> Whole:
    cut_L: Whole = (weight_LM.sum(axis=1) - 1) // 2
    return cut_L


def _centre_alone(weight_LM: Whole, cut_L: Whole) -> AggregationDecision:
    num_leaves = len(weight_LM)
    return AggregationDecision(coefficients_LM=np.zeros(weight_LM.shape), centre_L=np.ones(num_leaves), cut_L=cut_L)


# Aggregators that look for a point near most slices start at the coordinate median, which one far slice cannot move
# far. Among mixed slices they start at the medoid, which costs nothing, since it is a combination of slices. They
# measure lengths in multiples of the weighted median distance from the start, because a run cannot know how long its
# pseudo-gradients are. Each point on the way is a combination of the slices and the start, so that products [M, M] are
# all they need, and iterations cost next to nothing. If members with at least half of the weight agree in every value,
# the median distance is 0, and their slice is the result. Memory: one decoded frame of each member, and the part's
# encoded slices.


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricMedian(Aggregator):
    """The point with the least weighted sum of distances to the slices, by at most `iterations` of Weiszfeld's
    algorithm (Pillutla et al. 2019, arXiv 1912.13445, algorithm 2). Deviations: the start is the coordinate median, and
    a slice nearer than `smoothing` median distances gains no more weight. It is robust while liars have less than half
    of the weight."""

    name: ClassVar[str] = "geometric_median"
    survey: ClassVar[Survey] = "distances"

    smoothing: float = bounded(1e-4, 1e-9, 1.0)
    iterations: int = bounded(50, 1, 1000)

    def decide(self, weight_LM: Whole, survey: Doubles, /) -> AggregationDecision:
        def moved(rows: Rows, _point_RM: Doubles, reached_RM: Doubles, unit_R: Doubles) -> Doubles:
            pull_RM = weight_LM[rows] / np.maximum(self.smoothing * unit_R[:, None], reached_RM)
            return pull_RM / ordered_sum(pull_RM)[:, None]

        return _fixed_point(weight_LM, survey, 1.0, self.iterations, moved, centre_is_rest=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CenteredClip(Aggregator):
    """The fixed point of v <- v + weighted mean of (slice - v) * min(1, tau / |slice - v|), by at most `iterations`
    (Karimireddy et al. 2021, arXiv 2012.10333, algorithm 2). Deviations: the start is the coordinate median instead of
    the last result, and tau is `radius` median distances. A liar with share s of the weight moves each iteration by at
    most s * tau. With a radius of 1, about half of the honest slices are clipped; with the default, hardly any are
    (`tests/bench/test_bench_liars.py`)."""

    name: ClassVar[str] = "centered_clip"
    survey: ClassVar[Survey] = "distances"

    radius: float = bounded(2.0, 0.01, 100.0)
    iterations: int = bounded(50, 1, 1000)

    def decide(self, weight_LM: Whole, survey: Doubles, /) -> AggregationDecision:
        fair_LM = shares(weight_LM)

        def moved(rows: Rows, point_RM: Doubles, reached_RM: Doubles, limit_R: Doubles) -> Doubles:
            pull_RM = fair_LM[rows] * _within(reached_RM, limit_R)
            return point_RM * (1 - ordered_sum(pull_RM))[:, None] + pull_RM

        return _fixed_point(weight_LM, survey, self.radius, self.iterations, moved, centre_is_rest=True)


Rows: TypeAlias = NDArray[np.intp]
_Step: TypeAlias = Callable[[Rows, Doubles, Doubles, Doubles], Doubles]
"""`moved(rows, point_RM, reached_RM, unit_R)` returns the next points [R, M] of the leaves `rows`, given their points
as coefficients, the distances from these to the slices, and the units of length."""


def _fixed_point(
    weight_LM: Whole, products_LMM: Doubles, radius: float, iterations: int, moved: _Step, *, centre_is_rest: bool
) -> AggregationDecision:
    """Return the decision for the fixed point of `moved`, or for the point after `iterations`. The unit of length is
    `radius` times the weighted median distance of the slices from the start. With `centre_is_rest` the start's
    coefficient is 1 minus the sum of the others, else 0. Where the unit is 0, the start is the result."""
    start_LM = distances(products_LMM, np.zeros(weight_LM.shape))
    unit_L = radius * weighted_median(start_LM, weight_LM)
    point_LM, reached_LM = np.zeros(weight_LM.shape), start_LM.copy()
    rows = np.flatnonzero(unit_L)
    for _ in range(iterations):
        if not rows.size:
            break
        former_RM = point_LM[rows]
        point_RM = moved(rows, former_RM, reached_LM[rows], unit_L[rows])
        point_LM[rows], reached_LM[rows] = point_RM, distances(products_LMM[rows], point_RM)
        rows = rows[(np.abs(point_RM - former_RM) > _STILL).any(axis=1)]
    rest_L = 1 - ordered_sum(point_LM) if centre_is_rest else np.zeros(len(unit_L))
    return AggregationDecision(
        coefficients_LM=point_LM,
        centre_L=np.where(unit_L == 0, 1.0, np.where(np.abs(rest_L) < _NO_REST, 0.0, rest_L)),
        cut_L=_median_cut(weight_LM),
        kept_LM=np.where(unit_L[:, None] == 0, start_LM == 0, _within(reached_LM, unit_L)),
    )


def _within(length_LM: Doubles, limit_L: Doubles) -> Doubles:
    """Return the factor [L, M] that shortens each slice to its leaf's limit; 1 for a slice that is not longer."""
    limit_LM = np.broadcast_to(limit_L[:, None], length_LM.shape)
    return np.divide(limit_LM, length_LM, out=np.ones(length_LM.shape), where=length_LM > limit_LM)


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

DEFAULT_AGGREGATOR = CenteredClip.name
"""With `mixing.DEFAULT_MIXING`, three liars of ten do the least harm, on equal and on unequal data, and honest members
lose nothing: `tests/bench/test_bench_attacks.py`, `tests/bench/test_bench_lying_run.py`."""


def aggregator_names() -> tuple[str, ...]:
    return tuple(_AGGREGATORS)


def parameter_names(name: str) -> tuple[str, ...]:
    """Return the parameters of the aggregator `name`, which is in `aggregator_names()`."""
    return tuple(each.name for each in parameter_fields(_AGGREGATORS[name]))


def get_aggregator(name: str, parameters: Mapping[str, float], mixing: Mixing | None = None) -> Aggregator:
    """Return the aggregator `name`, which is in `aggregator_names()`, for slices that `mixing` mixes. `parameters`
    replace the defaults. Raises ValueError for a parameter that is unknown or out of bounds."""
    if unknown := [key for key in parameters if key not in parameter_names(name)]:
        raise ValueError(f"{name} has no parameter {unknown[0]!r}: it has {', '.join(parameter_names(name)) or 'none'}")
    kind: Any = _AGGREGATORS[name]
    made: Aggregator = kind(mixing=mixing, **parameters)
    return made


def parameters_of(aggregator: Aggregator) -> dict[str, float]:
    """Return all parameters of an aggregator. Whole numbers are int and all others float, so that equal settings have
    equal bytes."""
    found = ((each, getattr(aggregator, each.name)) for each in parameter_fields(type(aggregator)))
    return {each.name: value if isinstance(each.default, int) else float(value) for each, value in found}
