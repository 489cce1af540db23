"""Aggregates many leaves at a time: surveys the slices, has an aggregator decide, and combines the slices.

Equal frames give equal bits on every machine, and a leaf gives the same bits with or without others. Members are added
in the given order: each product of a coefficient (rounded to fp32) and a value is rounded to fp32, then added to the
sum in fp32. A trimmed mean of coordinates is added last. Where slices are mixed first, an aggregator that looks at
norms, products or distances decides from the mixed slices' scalar products, which follow from those of the slices. The
result is then a sum over the slices themselves, so no mixed slice is computed. Only the trimmed mean of each coordinate
needs mixed slices.

Shapes: L leaves, M members, K mixed slices, V values of a leaf, F values of a frame: L * V.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

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
    Whole,
    centred,
    diagonal,
    median_cut,
    products,
    squared_distances,
    squares,
    trimmed_mean,
)
from swarm.trust.mixing import MixedSlices


class Aggregation:
    """Aggregates the leaves of a frame. `weights` are the members' weights, in the members' order; a member with weight
    0 does not count. `beacons` has one value for each leaf (`mixing.leaf_beacon`), for a mixing that draws; their
    number is the number of leaves, which have equal sizes.

    If `has_survey`, call `survey` with each frame's rows. Then call `decide`, then `combine` with each frame's rows.
    The caller keeps the rows meanwhile. Each further frame holds further values of the same leaves. Rows are one fp32
    array [F] for each member, consumed one after the other. Raises ValueError if no member has weight, and before it
    uses a row that is not finite.
    """

    def __init__(self, aggregator: Aggregator, weights: Sequence[int], beacons: Sequence[bytes] = (b"",)) -> None:
        if any(type(weight) is not int or weight < 0 for weight in weights):
            raise ValueError("weights are whole numbers that are not negative")
        if not any(weights):
            raise ValueError("no member has any weight")
        self._aggregator = aggregator
        self._num_members = len(weights)
        self._counted = [member for member, weight in enumerate(weights) if weight]
        self._weights = _scaled([weights[member] for member in self._counted])
        self._beacons = beacons
        self._surveyed = self._input()
        self._survey: Doubles = np.zeros(self._survey_shape())
        self._mixed: MixedSlices | None = None
        self._decision: AggregationDecision | None = None

    @property
    def has_survey(self) -> bool:
        return self._surveyed != "nothing"

    def survey(self, rows: Iterable[Floats]) -> None:
        if self._surveyed == "norms":
            for index, x_LV in enumerate(self._checked(rows)):
                self._survey[:, index] += squares(x_LV)
            return
        x_MLV = np.stack(list(self._checked(rows)))
        if self._surveyed == "distances":
            x_MF = x_MLV.reshape(len(x_MLV), -1)
            centred(x_MF, trimmed_mean(x_MF, self._weights, median_cut(self._weights)))
        self._survey += products(x_MLV.transpose(1, 0, 2))

    def decide(self) -> AggregationReport:
        mixing, weight_LM = self._aggregator.mixing, self._leaf_weights
        if mixing is not None:
            self._mixed = mixing.mix(self._weights, self._survey, self._beacons)
            self._decision = self._decided(self._mixed)
        else:
            survey = np.sqrt(self._survey) if self._surveyed == "norms" else self._survey
            self._decision = self._aggregator.decide(weight_LM, survey)
        kept_LM = self._decision.kept_LM
        kept = () if kept_LM is None else self._of_all(kept_LM.mean(axis=0))
        return AggregationReport(kept=kept, note=self._decision.note)

    @property
    def is_sum(self) -> bool:
        """Return whether there is one leaf, whose decided result is only the sum of `coefficients` * slices."""
        assert self._decision is not None
        return len(self._beacons) == 1 and not self._decision.centre_L.any()

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficient of each slice of the only leaf. Valid after `decide`."""
        assert self._decision is not None
        return self._of_all(self._decision.coefficients_LM[0])

    def combine(self, rows: Iterable[Floats]) -> Floats:
        """Return the frame's result [F]."""
        decision = self._decision
        assert decision is not None
        has_centre = np.flatnonzero(decision.centre_L)
        if not has_centre.size:
            return _sum(self._checked(rows), decision.coefficients_LM).ravel()
        x_MLV = np.stack(list(self._checked(rows)))
        sum_LV = _sum(x_MLV, decision.coefficients_LM)
        centre_RV = self._centre(x_MLV[:, has_centre], has_centre, decision.cut_L)
        sum_LV[has_centre] += centre_RV * decision.centre_L[has_centre, None].astype(np.float32)
        return sum_LV.ravel()

    def _centre(self, x_MRV: Floats, rows: NDArray[np.intp], cut_L: Whole) -> Floats:
        """Return the trimmed mean of each coordinate of the leaves `rows` [R, V], whose slices are `x_MRV`."""
        if self._mixed is None:
            weight_RK, mixed_KRV = self._leaf_weights[rows], x_MRV
        else:
            weight_RK, shares_KRM = self._mixed.weight_LK[rows], self._mixed.shares_LKM[rows].transpose(1, 0, 2)
            mixed_KRV = np.stack([_sum(x_MRV, shares_RM) for shares_RM in shares_KRM])
        centre_RV = np.empty(x_MRV.shape[1:], dtype=np.float32)
        weights, which_R = np.unique(weight_RK, axis=0, return_inverse=True)
        for index, weight_K in enumerate(weights):
            same = np.flatnonzero(which_R.ravel() == index)
            x_KF = mixed_KRV[:, same].reshape(len(weight_K), -1)
            centre_RV[same] = trimmed_mean(x_KF, weight_K.tolist(), int(cut_L[rows[same[0]]])).reshape(same.size, -1)
        return centre_RV

    @property
    def _leaf_weights(self) -> Whole:
        return np.broadcast_to(np.array(self._weights), (len(self._beacons), len(self._weights)))

    def _input(self) -> Survey:
        """Return what `survey` has to learn of the unmixed slices."""
        kind, mixing = self._aggregator.survey, self._aggregator.mixing
        if mixing is None:
            return kind
        return "products" if mixing.needs_products or kind != "nothing" else "nothing"

    def _survey_shape(self) -> tuple[int, ...]:
        num_leaves, num_counted = len(self._beacons), len(self._counted)
        if self._surveyed == "nothing":
            return (num_leaves,)
        return (num_leaves, num_counted) if self._surveyed == "norms" else (num_leaves, num_counted, num_counted)

    def _decided(self, mixed: MixedSlices) -> AggregationDecision:
        """Return what the aggregator decides about mixed slices, with coefficients of the unmixed slices."""
        kind, survey, start_L1 = self._aggregator.survey, self._survey, None
        if kind != "nothing":
            survey = mixed.products(survey)
        if kind == "norms":
            survey = np.sqrt(np.maximum(diagonal(survey), 0.0))
        elif kind == "distances":
            start_L1 = _medoid(survey, mixed.weight_LK)[:, None]
            survey = _from_start(survey, start_L1)
        decision = self._aggregator.decide(mixed.weight_LK, survey)
        coefficients_LK = decision.coefficients_LM
        if start_L1 is not None:
            at_start_L1 = np.take_along_axis(coefficients_LK, start_L1, axis=1) + decision.centre_L[:, None]
            coefficients_LK = coefficients_LK.copy()
            np.put_along_axis(coefficients_LK, start_L1, at_start_L1, axis=1)
            decision = replace(decision, centre_L=np.zeros(len(coefficients_LK)))
        coefficients_LM = mixed.coefficients(coefficients_LK)
        kept_LM = None if decision.centre_L.any() else kept_shares(coefficients_LM, shares(self._leaf_weights))
        return replace(decision, coefficients_LM=coefficients_LM, kept_LM=kept_LM)

    def _checked(self, rows: Iterable[Floats]) -> Iterator[Floats]:
        """Yield the rows of the members that count, each as [L, V]. Raises ValueError if one is not finite."""
        num_rows = num_values = 0
        for member, row_F in enumerate(rows):
            num_rows += 1
            if row_F.dtype != np.float32 or row_F.ndim != 1 or (member and row_F.size != num_values):
                raise ValueError("rows are flat fp32 arrays of one size")
            num_values = row_F.size
            if member in self._counted:
                # the extremes of a row with a NaN are NaN
                if num_values and not (np.isfinite(row_F.min()) and np.isfinite(row_F.max())):
                    raise ValueError(f"the slice of member {member} holds a value that is not finite")
                num_leaves = len(self._beacons)
                yield row_F.reshape(num_leaves, num_values // num_leaves)
        if num_rows != self._num_members:
            raise ValueError(f"{num_rows} rows of {self._num_members} members")

    def _of_all(self, values: Doubles) -> tuple[float, ...]:
        """Return `values`, which are those of the counted members, with a 0 for each other member."""
        known = dict(zip(self._counted, values.tolist(), strict=True))
        return tuple(known.get(member, 0.0) for member in range(self._num_members))


def _medoid(products_LKK: Doubles, weight_LK: Whole) -> NDArray[np.intp]:
    """Return for each leaf the index of the slice with the least weighted median distance to all slices, the first of
    equal ones [L]."""
    away_LKK, num_slices = np.sqrt(squared_distances(products_LKK)), weight_LK.shape[1]
    weight_SK = np.repeat(weight_LK, num_slices, axis=0)
    median_LK = weighted_median(away_LKK.reshape(-1, num_slices), weight_SK).reshape(-1, num_slices)
    first_L: NDArray[np.intp] = np.argmin(median_LK, axis=1)
    return first_L


def _from_start(products_LKK: Doubles, start_L1: NDArray[np.intp]) -> Doubles:
    """Return the scalar products of the slices minus the slice of each leaf's start [L, K, K]."""
    to_start_LK = np.take_along_axis(products_LKK, start_L1[:, :, None], axis=2)[:, :, 0]
    own_L1 = np.take_along_axis(to_start_LK, start_L1, axis=1)
    from_start_LKK: Doubles = products_LKK - to_start_LK[:, :, None] - to_start_LK[:, None, :] + own_L1[:, :, None]
    return from_start_LKK


def _sum(rows: Iterable[Floats], coefficients_LM: Doubles) -> Floats:
    """Return the sum [L, V] of the slices `rows`, each [L, V], by their coefficients in each leaf."""
    sum_LV: Floats | None = None
    for x_LV, coefficient_L in zip(rows, coefficients_LM.T, strict=True):
        if sum_LV is None:
            sum_LV, product_LV = np.zeros(x_LV.shape, np.float32), np.empty(x_LV.shape, np.float32)
        if coefficient_L.any():
            np.multiply(x_LV, coefficient_L[:, None].astype(np.float32), out=product_LV)
            np.add(sum_LV, product_LV, out=sum_LV)
    assert sum_LV is not None
    return sum_LV


def _scaled(weights: Sequence[int]) -> tuple[int, ...]:
    """Scale `weights` to units of about 2^-28 of their sum, so that a trimmed mean can cut the sum finely even if there
    are few tokens.

    The ratios are kept as far as such units can express them; each weight is at least one unit.
    """
    unit = math.gcd(*weights)
    total = sum(weights) // unit
    shift = max(0, total.bit_length() - WEIGHT_BITS)
    return tuple(max(1, (weight // unit >> shift) * max(1, (1 << WEIGHT_BITS) // total)) for weight in weights)
