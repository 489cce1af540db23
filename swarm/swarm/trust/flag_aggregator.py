"""The Flag Aggregator: the mean of the slices within the subspace that explains most of the slices best.

Everything follows from the slices' scalar products [M, M]: an orthonormal basis of the subspace is a combination of
slices, and so is what it makes of their mean. Shapes: M members, K dimensions of the subspace.

The eigenvectors of the small symmetric matrix have the same bits on every machine, which LAPACK does not promise.
Jacobi's method with disjoint rotations in parallel (Golub and Van Loan, Matrix Computations, 4th edition, section
8.5.5): each sweep rotates every pair of rows and columns once, half of the matrix at a time, with nothing but
elementwise operations in fp64, which IEEE 754 rounds alike everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from swarm.trust.aggregator import (
    AggregationDecision,
    AggregationReport,
    Aggregator,
    Survey,
    bounded,
    kept_shares,
    shares,
    weighted_median,
)
from swarm.trust.kernels import Doubles, matrix_product

_LEAST_MISS = 1e-3
"""A slice that the subspace explains to this share or better gains no more weight."""
_LEAST_VALUE = 1e-9
"""A share of the greatest eigenvalue: what is below it is no direction of the slices, but rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagAggregator(Aggregator):
    """Project the weighted mean onto the subspace of (M + 1) / 2 dimensions that has the least weighted sum of
    sqrt(1 - explained share) over the slices' directions, found by `iterations` of reweighted least squares (Almansoori
    et al. 2023, arXiv 2302.05865, algorithm 1).

    Directions that few slices have do not get into the subspace. Deviations: no regulariser over pairs; slices count by
    weight; and their lengths are clipped to the weighted median length before the mean, without which one long slice
    rules it. It bounds lengths as the norm-clipped mean does, and directions only as far as liars do not agree on one.
    Memory: one decoded frame of each member, and the part's encoded slices.
    """

    name: ClassVar[str] = "flag"
    survey: ClassVar[Survey] = "products"

    iterations: int = bounded(5, 1, 100)

    def decide(self, weights: Sequence[int], survey: Doubles, /) -> AggregationDecision:
        norms = [math.sqrt(max(0.0, square)) for square in survey.diagonal().tolist()]
        there = [member for member, norm in enumerate(norms) if norm > 0]
        limit = weighted_median(norms, weights)
        coefficients = [0.0] * len(weights)
        if limit:
            norm_M = np.array([norms[member] for member in there])
            gram_MM = survey[np.ix_(there, there)] / (norm_M[:, None] * norm_M[None, :])
            fair = shares(weights)
            pull_M = np.array([fair[member] * min(norms[member], limit) for member in there])
            projected_M = self._projected(gram_MM, np.array([fair[member] for member in there]), pull_M)
            for member, coefficient in zip(there, (projected_M / norm_M).tolist(), strict=True):
                coefficients[member] = coefficient
        kept = kept_shares(coefficients, shares(weights))
        return AggregationDecision(coefficients=tuple(coefficients), report=AggregationReport(kept=kept))

    def _projected(self, gram_MM: Doubles, fair_M: Doubles, pull_M: Doubles) -> Doubles:
        """Return the projection of the sum of `pull_M` * direction as coefficients of the directions [M], whose scalar
        products are `gram_MM`."""
        num_dimensions = (len(gram_MM) + 2) // 2
        weight_M = fair_M
        for _ in range(self.iterations):
            root_M = np.sqrt(weight_M)
            values_M, vectors_MM = symmetric_eigen(root_M[:, None] * gram_MM * root_M[None, :])
            is_real_K = values_M[-num_dimensions:] > _LEAST_VALUE * values_M[-1]
            values_K, vectors_MK = values_M[-num_dimensions:][is_real_K], vectors_MM[:, -num_dimensions:][:, is_real_K]
            # column k of this combines the directions to the k-th vector of an orthonormal basis
            basis_MK = root_M[:, None] * vectors_MK / np.sqrt(values_K)[None, :]
            parts_MK = matrix_product(gram_MM, basis_MK)
            explained_M = np.array([math.fsum(row) for row in (parts_MK * parts_MK).tolist()])
            weight_M = fair_M / np.sqrt(np.maximum(_LEAST_MISS, 1 - explained_M))
        along_K1 = matrix_product(np.ascontiguousarray(parts_MK.T), pull_M[:, None])
        return matrix_product(basis_MK, along_K1)[:, 0]


_MAX_SWEEPS = 12
"""Convergence is quadratic: a matrix of 64 rows takes about 8."""
_NEGLIGIBLE = 1e-14


def symmetric_eigen(a_MM: Doubles) -> tuple[Doubles, Doubles]:
    """Return the eigenvalues [M], ascending, and the eigenvectors as the columns of [M, M]. `a_MM` is symmetric and
    finite, with magnitudes of which the squares are, too."""
    a_MM, vectors_MM = a_MM.copy(), np.eye(len(a_MM))
    scale = float(np.abs(a_MM).max(initial=0.0))
    for _ in range(_MAX_SWEEPS):
        for low_P, high_P in _rounds(len(a_MM)):
            cos_P, sin_P = _rotations(a_MM, low_P, high_P)
            _rotate(a_MM, low_P, high_P, cos_P, sin_P)
            _rotate(a_MM.T, low_P, high_P, cos_P, sin_P)
            _rotate(vectors_MM.T, low_P, high_P, cos_P, sin_P)
        if float(np.abs(a_MM - np.diag(a_MM.diagonal())).max(initial=0.0)) <= _NEGLIGIBLE * scale:
            break
    values_M = a_MM.diagonal()
    order_M = np.argsort(values_M, kind="stable")
    return values_M[order_M], vectors_MM[:, order_M]


@lru_cache(maxsize=16)
def _rounds(num_rows: int) -> tuple[tuple[NDArray[np.intp], NDArray[np.intp]], ...]:
    """Return the rounds of a tournament in which each row meets each other once: pairs (low, high), disjoint in a
    round."""
    seats = list(range(num_rows + num_rows % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = [sorted(pair) for pair in zip(seats[:half], reversed(seats[half:]), strict=True)]
        played = sorted(pair for pair in pairs if pair[1] < num_rows)
        if played:
            rounds.append((np.array([low for low, _ in played]), np.array([high for _, high in played])))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def _rotations(a_MM: Doubles, low_P: NDArray[np.intp], high_P: NDArray[np.intp]) -> tuple[Doubles, Doubles]:
    """Return cosine and sine of the rotation that makes each pair's off-diagonal value zero."""
    off_P = a_MM[low_P, high_P]
    is_off_P = off_P != 0
    with np.errstate(over="ignore"):
        ratio_P = (a_MM[high_P, high_P] - a_MM[low_P, low_P]) / (2 * np.where(is_off_P, off_P, 1.0))
        tangent_P = np.where(ratio_P < 0, -1.0, 1.0) / (np.abs(ratio_P) + np.sqrt(1 + ratio_P * ratio_P))
    tangent_P = np.where(is_off_P, tangent_P, 0.0)
    cos_P = 1 / np.sqrt(1 + tangent_P * tangent_P)
    return cos_P, tangent_P * cos_P


def _rotate(a_MM: Doubles, low_P: NDArray[np.intp], high_P: NDArray[np.intp], cos_P: Doubles, sin_P: Doubles) -> None:
    """Rotate the pairs of rows, in place."""
    low_PM, high_PM = a_MM[low_P], a_MM[high_P]
    a_MM[low_P] = cos_P[:, None] * low_PM - sin_P[:, None] * high_PM
    a_MM[high_P] = sin_P[:, None] * low_PM + cos_P[:, None] * high_PM
