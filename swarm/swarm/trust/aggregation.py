"""The aggregation of one part: the loops over its slices that an aggregator's decision needs.

One pass over the frames surveys them, if the aggregator needs it; a second one combines them. The caller passes the
frames twice, in one order, and decides where they are kept meanwhile. Nothing here knows peers or codecs.

Equal frames give equal bits on every machine: members are added in the given order; each product of a coefficient
(rounded to fp32) and a value is rounded to fp32, then added to the sum in fp32; the coordinates' centre comes last.
Shapes: M members, F values of a frame, N values of the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from swarm.trust.aggregators import AggregationDecision, AggregationError, AggregationReport, Aggregator, NotFinite
from swarm.trust.kernels import WEIGHT_BITS, Doubles, Floats, centred, median_cut, products, square, trimmed_mean


class Aggregation:
    """Aggregates one part. `weights` are the members' weights, in their order; a member with 0 is not counted.

    Call `survey` with each frame's rows if `has_survey`, then `decide`, then `combine` with each frame's rows. Rows are
    one fp32 array [F] for each member, consumed one after the other. Raises AggregationError if no member has weight,
    and NotFinite before it uses a row.
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
        return AggregationReport(norms=self._of_all(report.norms), kept=self._of_all(report.kept), note=report.note)

    @property
    def is_sum(self) -> bool:
        """Whether the decided result is the sum of `coefficients` * slices and nothing else."""
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


def aggregate(
    aggregator: Aggregator, frames: Callable[[], Iterable[Iterable[Floats]]], weights: Sequence[int]
) -> tuple[Floats, AggregationReport]:
    """Return the result [N] for a part whose frames are at hand, and the report. Each call of `frames()` yields them
    from the first on. Raises as Aggregation does."""
    aggregation = Aggregation(aggregator, weights)
    if aggregation.has_survey:
        for rows in frames():
            aggregation.survey(rows)
    report = aggregation.decide()
    results = [aggregation.combine(rows) for rows in frames()]
    return np.concatenate([np.empty(0, dtype=np.float32), *results]), report


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
