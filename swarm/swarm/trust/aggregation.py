"""The aggregation of one part, or of one leaf of it: passes the slices by an aggregator and combines them.

Equal frames give equal bits on every machine: members are added in the given order; each product of a coefficient
(rounded to fp32) and a value is rounded to fp32, then added to the sum in fp32; a trimmed mean of coordinates comes
last. Where slices are mixed first, an aggregator that looks at norms or distances decides on the mixed slices' scalar
products, which follow from those of the slices, and the result is a sum over slices all the same: no mixed slice is
made. Only the trimmed mean of each coordinate needs them. Shapes: M members, K mixed slices, F values of a frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from swarm.trust.aggregator import (
    AggregationDecision,
    AggregationReport,
    Aggregator,
    Survey,
    kept_shares,
    shares,
    weighted_median,
)
from swarm.trust.kernels import (
    WEIGHT_BITS,
    Doubles,
    Floats,
    centred,
    median_cut,
    products,
    square,
    squared_distances,
    trimmed_mean,
)
from swarm.trust.mixing import MixedSlices


class AggregationError(ValueError):
    """The slices cannot be aggregated."""


class NotFinite(AggregationError):
    """`member`, counted in the given order, sent NaN or infinity."""

    def __init__(self, member: int) -> None:
        super().__init__(f"the slice of member {member} holds a value that is not finite")
        self.member = member


class Aggregation:
    """Aggregates one part or leaf. `weights` are the members' weights, in their order; a member with 0 is not counted.
    `beacon` is the leaf's (`mixing.leaf_beacon`), for a mixing that draws.

    Call `survey` with each frame's rows if `has_survey`, then `decide`, then `combine` with each frame's rows, in the
    same order; the caller decides where they are kept meanwhile. Rows are one fp32 array [F] for each member, consumed
    one after the other. Raises AggregationError if no member has weight, and NotFinite before it uses a row.
    """

    def __init__(self, aggregator: Aggregator, weights: Sequence[int], beacon: bytes = b"") -> None:
        if any(type(weight) is not int or weight < 0 for weight in weights):
            raise ValueError("weights are whole numbers that are not negative")
        if not any(weights):
            raise AggregationError("no member has any weight")
        self._aggregator = aggregator
        self._num_members = len(weights)
        self._counted = [member for member, weight in enumerate(weights) if weight]
        self._weights = _scaled([weights[member] for member in self._counted])
        self._beacon = beacon
        self._surveyed = self._input()
        self._survey: Doubles = np.zeros(self._survey_shape())
        self._mixed: MixedSlices | None = None
        self._decision: AggregationDecision | None = None

    @property
    def has_survey(self) -> bool:
        return self._surveyed != "nothing"

    def survey(self, rows: Iterable[Floats]) -> None:
        if self._surveyed == "norms":
            for index, (_, row_F) in enumerate(self._checked(rows)):
                self._survey[index] += square(row_F)
            return
        x_MF = np.stack([row_F for _, row_F in self._checked(rows)])
        if self._surveyed == "distances":
            x_MF = centred(x_MF, trimmed_mean(x_MF, self._weights, median_cut(self._weights)))
        self._survey += products(x_MF)

    def decide(self) -> AggregationReport:
        mixing = self._aggregator.mixing
        if mixing is not None:
            self._mixed = mixing.mix(self._weights, self._survey, self._beacon)
            self._decision = self._decided(self._mixed)
        else:
            survey = np.sqrt(self._survey) if self._surveyed == "norms" else self._survey
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
        mixed, weights, mixed_KF = self._mixed, self._weights, x_MF
        if mixed is not None:
            weights, mixed_KF = mixed.weights, np.stack([_sum(x_MF, shares_M) for shares_M in mixed.shares_KM.tolist()])
        centre_F = trimmed_mean(mixed_KF, weights, decision.cut)
        return _sum((*x_MF, centre_F), (*decision.coefficients, decision.centre))

    def _input(self) -> Survey:
        """Return what has to be known of the slices themselves."""
        kind, mixing = self._aggregator.survey, self._aggregator.mixing
        if mixing is None:
            return kind
        return "products" if mixing.needs_products or kind != "nothing" else "nothing"

    def _survey_shape(self) -> tuple[int, ...]:
        num_counted = len(self._counted)
        return {"nothing": (), "norms": (num_counted,)}.get(self._surveyed, (num_counted, num_counted))

    def _decided(self, mixed: MixedSlices) -> AggregationDecision:
        """Return what the aggregator decides on mixed slices, in terms of the slices."""
        kind, products_KK, start = self._aggregator.survey, np.zeros(()), None
        if kind != "nothing":
            products_KK = mixed.products(self._survey)
        if kind == "norms":
            products_KK = np.sqrt(np.maximum(products_KK.diagonal(), 0.0))
        elif kind == "distances":
            start = _medoid(products_KK, mixed.weights)
            products_KK = _from_start(products_KK, start)
        decision = self._aggregator.decide(mixed.weights, products_KK)
        coefficients_K = list(decision.coefficients)
        if start is not None:
            coefficients_K[start] += decision.centre
            decision = replace(decision, centre=0.0)
        coefficients = mixed.coefficients(coefficients_K)
        kept = () if decision.centre else kept_shares(coefficients, shares(self._weights))
        report = AggregationReport(kept=kept, note=decision.report.note)
        return replace(decision, coefficients=coefficients, report=report)

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


def _medoid(products_KK: Doubles, weights: Sequence[int]) -> int:
    """Return the slice with the least weighted median distance to all; of equal ones the first."""
    away = np.sqrt(squared_distances(products_KK)).tolist()
    medians = [weighted_median(away_K, weights) for away_K in away]
    return medians.index(min(medians))


def _from_start(products_KK: Doubles, start: int) -> Doubles:
    """Return the scalar products of the slices less slice `start`."""
    to_start_K = products_KK[:, start]
    from_start_KK: Doubles = products_KK - to_start_K[:, None] - to_start_K[None, :] + to_start_K[start]
    return from_start_KK


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
