"""The aggregators: how an owner combines the members' slices of its part, as mean, trimmed, clipped or by distance.

An aggregator decides with M or M x M numbers; the loops over values are in `Aggregation` and `kernels`. So its decision
is a short pure function, and every aggregator's result is

    sum over members of coefficient * slice  +  centre * trimmed mean of each coordinate

Decisions use fp64 with correctly rounded sums (`math.fsum`), so that they are the same bits on every machine. Equal
frames give equal bits, too: members are added in the given order; each product of a coefficient (rounded to fp32) and
a value is rounded to fp32, then added to the sum in fp32; the coordinates' centre comes last. Robustness holds for
each part on its own, and by weight (tokens that the round has granted), except where an aggregator says that it counts
members. A new aggregator is a class here, its place in `_AGGREGATORS`, and a row in the tests' table. Nothing here
knows peers or codecs. Shapes: M members, F values of a frame.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from swarm.trust.kernels import WEIGHT_BITS, Doubles, Floats, centred, median_cut, products, square, trimmed_mean

Survey: TypeAlias = Literal["nothing", "norms", "distances"]

_STILL = 1e-7
"""The iteration ends when no coefficient changes by more: fp32 resolves no less."""


class AggregationError(ValueError):
    """The slices cannot be aggregated."""


class NotFinite(AggregationError):
    """`member`, counted in the given order, sent NaN or infinity."""

    def __init__(self, member: int) -> None:
        super().__init__(f"the slice of member {member} holds a value that is not finite")
        self.member = member


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationReport:
    """What the aggregation did to each member, in the members' order.

    `kept` is the share of each slice's weight that was left: 1 for all, 0 for a slice that was left out; it is empty
    where each coordinate is aggregated on its own. `note` says why the result is less robust than the run asks for."""

    kept: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationDecision:
    """What an aggregator decided: `coefficients` and `centre` of the module's formula. `cut` is the weight trimmed at
    each end."""

    coefficients: tuple[float, ...]
    centre: float = 0.0
    cut: int = 0
    report: AggregationReport = AggregationReport()


def bounded(default: float, low: float, high: float) -> Any:
    """Declare a parameter of an aggregator. It is a whole number if the default is one."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregator(ABC):
    """An aggregator, whose fields are its parameters. Raises ValueError that names each impossible one."""

    name: ClassVar[str]
    survey: ClassVar[Survey]
    """The input of `decide`: nothing, norms [M], or products [M, M] of the slices less the coordinates' median."""

    def __post_init__(self) -> None:
        problems = []
        for each in fields(self):
            value, low, high = getattr(self, each.name), each.metadata["low"], each.metadata["high"]
            whole = isinstance(each.default, int)
            number = type(value) is int if whole else type(value) in {int, float}
            if not number or not low <= value <= high:
                kind = "whole number" if whole else "number"
                problems.append(f"{each.name} = {repr(value)[:80]}: use a {kind} from {low:g} to {high:g}")
        if problems:
            raise ValueError("; ".join(problems))

    @abstractmethod
    def decide(self, weights: Sequence[int], survey: Doubles, /) -> AggregationDecision:
        """Return the decision, with one coefficient for each of `weights`, which are positive."""

    def fewest_members(self) -> int:
        """Return how many members must contribute for the robustness that the parameters promise."""
        return 1


def shares(weights: Sequence[int]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def weighted_median(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the lowest value that, with all below it, has at least half of the weight."""
    below, total = 0, sum(weights)
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if 2 * below >= total:
            return value
    raise ValueError("the median of nothing")


def distances(products_MM: Doubles, coefficients: Sequence[float]) -> tuple[float, ...]:
    """Return the distance from each member's slice to the point sum of coefficient * slice, all relative to the
    centre."""
    pull = [math.fsum((row * coefficients).tolist()) for row in products_MM]
    square = math.fsum(each * coefficient for each, coefficient in zip(pull, coefficients, strict=True))
    own = products_MM.diagonal().tolist()
    return tuple(
        math.sqrt(max(0.0, math.fsum((norm, -each, -each, square)))) for norm, each in zip(own, pull, strict=True)
    )


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

    liars: int = bounded(1, 0, 126)

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> AggregationDecision:
        num_members = len(weights)
        liars = min(self.liars, max(0, (num_members - 3) // 2))
        note = (
            f"{liars} liars are left out instead of {self.liars}, because only {num_members} members contribute"
            if liars < self.liars
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
        return 2 * self.liars + 3 if self.liars else 1


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

    trim: float = bounded(0.2, 0.0, 0.49)

    def decide(self, weights: Sequence[int], _survey: Doubles, /) -> AggregationDecision:
        cut = min(math.ceil(self.trim * sum(weights)), median_cut(weights))
        return AggregationDecision(coefficients=(0.0,) * len(weights), centre=1.0, cut=cut)


# Aggregators that look for a point near most slices start at the coordinate median, so that no slice, however far, is
# in the first point. They measure lengths in multiples of the weighted median distance from there, because a run cannot
# know how long its pseudo-gradients are. Each point on the way is a combination of the slices and the start, so that
# products [M, M] are all they need, and iterations cost nothing. If at least half of the weight agrees in every value,
# that median distance is 0, and these slices are the result. Memory: one decoded frame of each member, and the part's
# encoded slices.


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
    for kind in (Mean, NormClippedMean, CoordinateMedian, TrimmedMean, GeometricMedian, CenteredClip, MultiKrum)
}


def aggregator_names() -> tuple[str, ...]:
    return tuple(_AGGREGATORS)


def parameter_names(name: str) -> tuple[str, ...]:
    """Return the parameters of the aggregator `name`, which is in `aggregator_names()`."""
    return tuple(each.name for each in fields(_AGGREGATORS[name]))


def get_aggregator(name: str, parameters: Mapping[str, float]) -> Aggregator:
    """Return the aggregator `name`, which is in `aggregator_names()`. `parameters` replace its defaults. Raises
    ValueError."""
    if unknown := [key for key in parameters if key not in parameter_names(name)]:
        raise ValueError(f"{name} has no parameter {unknown[0]!r}: it has {', '.join(parameter_names(name)) or 'none'}")
    return _AGGREGATORS[name](**parameters)


def parameters_of(aggregator: Aggregator) -> dict[str, float]:
    """Return all parameters: counts as whole numbers and all others as floats, so that equal settings have equal
    bytes."""
    values = {each.name: getattr(aggregator, each.name) for each in fields(aggregator)}
    return {
        each.name: values[each.name] if isinstance(each.default, int) else float(values[each.name])
        for each in fields(aggregator)
    }


class Aggregation:
    """Aggregates one part. `weights` are the members' weights, in their order; a member with 0 is not counted.

    Call `survey` with each frame's rows if `has_survey`, then `decide`, then `combine` with each frame's rows, in the
    same order; the caller decides where they are kept meanwhile. Rows are one fp32 array [F] for each member, consumed
    one after the other. Raises AggregationError if no member has weight, and NotFinite before it uses a row.
    """

    def __init__(self, aggregator: Aggregator, weights: Sequence[int]) -> None:
        if any(type(weight) is not int or weight < 0 for weight in weights):
            raise ValueError("weights are whole numbers that are not negative")
        if not any(weights):
            raise AggregationError("no member has any weight")
        self._aggregator = aggregator
        self._num_members = len(weights)
        self._counted = [member for member, weight in enumerate(weights) if weight]
        self._weights = _scaled([weights[member] for member in self._counted])
        self._survey: Doubles = np.zeros(self._survey_shape())
        self._decision: AggregationDecision | None = None

    @property
    def has_survey(self) -> bool:
        return self._aggregator.survey != "nothing"

    def survey(self, rows: Iterable[Floats]) -> None:
        if self._aggregator.survey == "norms":
            for index, (_, row_F) in enumerate(self._checked(rows)):
                self._survey[index] += square(row_F)
        else:
            x_MF = np.stack([row_F for _, row_F in self._checked(rows)])
            centre_F = trimmed_mean(x_MF, self._weights, median_cut(self._weights))
            self._survey += products(centred(x_MF, centre_F))

    def decide(self) -> AggregationReport:
        survey = np.sqrt(self._survey) if self._aggregator.survey == "norms" else self._survey
        self._decision = self._aggregator.decide(self._weights, survey)
        report = self._decision.report
        return AggregationReport(kept=self._of_all(report.kept), note=report.note)

    @property
    def is_sum(self) -> bool:
        """Return whether the decided result is the sum of `coefficients` * slices and nothing else."""
        assert self._decision is not None
        return not self._decision.centre

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficient of each slice. Valid after `decide`."""
        assert self._decision is not None
        return self._of_all(self._decision.coefficients)

    def combine(self, rows: Iterable[Floats]) -> Floats:
        """Return the frame's result [F]."""
        decision = self._decision
        assert decision is not None
        checked = self._checked(rows)
        if not decision.centre:
            return _sum((row_F for _, row_F in checked), decision.coefficients)
        x_MF = np.stack([row_F for _, row_F in checked])
        centre_F = trimmed_mean(x_MF, self._weights, decision.cut)
        return _sum((*x_MF, centre_F), (*decision.coefficients, decision.centre))

    def _survey_shape(self) -> tuple[int, ...]:
        num_counted = len(self._counted)
        return {"nothing": (), "norms": (num_counted,), "distances": (num_counted, num_counted)}[
            self._aggregator.survey
        ]

    def _checked(self, rows: Iterable[Floats]) -> Iterator[tuple[int, Floats]]:
        """Yield the rows that count, with their members' positions."""
        num_rows = num_values = 0
        for member, row_F in enumerate(rows):
            num_rows += 1
            if row_F.dtype != np.float32 or row_F.ndim != 1 or (member and row_F.size != num_values):
                raise ValueError("rows are flat fp32 arrays of one size")
            num_values = row_F.size
            if member in self._counted:
                # the extremes of a row with a NaN are NaN
                if num_values and not (np.isfinite(row_F.min()) and np.isfinite(row_F.max())):
                    raise NotFinite(member)
                yield member, row_F
        if num_rows != self._num_members:
            raise ValueError(f"{num_rows} rows of {self._num_members} members")

    def _of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return `values` of the counted members with a 0 for each other member."""
        if not values:
            return ()
        known = dict(zip(self._counted, values, strict=True))
        return tuple(known.get(member, 0.0) for member in range(self._num_members))


def _sum(rows: Iterable[Floats], coefficients: Sequence[float]) -> Floats:
    sum_F: Floats | None = None
    for row_F, coefficient in zip(rows, coefficients, strict=True):
        if sum_F is None:
            sum_F, product_F = np.zeros_like(row_F), np.empty_like(row_F)
        if coefficient:
            np.multiply(row_F, np.float32(coefficient), out=product_F)
            np.add(sum_F, product_F, out=sum_F)
    assert sum_F is not None
    return sum_F


def _scaled(weights: Sequence[int]) -> tuple[int, ...]:
    """Scale `weights` to units of about 2^-28 of their sum, so that it can be cut finely, however few tokens there are.

    The ratios are kept as far as such units can express them; each weight is at least one unit.
    """
    unit = math.gcd(*weights)
    total = sum(weights) // unit
    shift = max(0, total.bit_length() - WEIGHT_BITS)
    return tuple(max(1, (weight // unit >> shift) * max(1, (1 << WEIGHT_BITS) // total)) for weight in weights)
