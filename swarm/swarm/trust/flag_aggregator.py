"""The Flag Aggregator: the mean of the slices within the subspace that explains most of the slices best.

Everything follows from the slices' scalar products [M, M]: an orthonormal basis of the subspace consists of
combinations of slices, and the projected mean is one, too. Shapes: L leaves, M members, K dimensions of the subspace.

The eigenvectors of the small symmetric matrices have the same bits on every machine, which LAPACK does not promise.
They come from Jacobi's method with disjoint rotations in parallel (Golub and Van Loan, Matrix Computations, 4th
edition, section 8.5.5). Each sweep rotates every pair of rows and columns once, in rounds of disjoint pairs, using
only elementwise operations in fp64, which IEEE 754 rounds alike everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from swarm.trust.aggregator import (
    AggregationDecision,
    Aggregator,
    Survey,
    bounded,
    decided_sum,
    kept_shares,
    shares,
    weighted_median,
)
from swarm.trust.kernels import Doubles, Whole, diagonal, matrix_product, ordered_sum

_LEAST_MISS = 1e-3
"""A slice of whose direction the subspace leaves this share or less unexplained gains no more weight."""
_LEAST_VALUE = 1e-9
"""An eigenvalue below this share of the greatest one comes from rounding and not from a direction of the slices."""

_LEAST_LENGTH = 2.0**-64
"""A slice that is not longer than this share of the median length counts as zero: the factor that makes a direction of
the shortest slices is more than fp32 holds, and one such slice made the result infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagAggregator(Aggregator):
    """Project the weighted mean onto the subspace of (M + 1) / 2 dimensions that has the least weighted sum of
    sqrt(1 - explained share) over the slices' directions, found by `iterations` of reweighted least squares (Almansoori
    et al. 2023, arXiv 2302.05865, algorithm 1).

    Directions that few slices have do not enter the subspace. Deviations: there is no regulariser over pairs; slices
    count by weight; and slices are clipped to the weighted median length before the mean, which one long slice would
    dominate otherwise. The aggregator bounds lengths as the norm-clipped mean does. It bounds directions only while
    liars do not agree on one. Memory: one decoded frame of each member, and the part's encoded slices.
    """

    name: ClassVar[str] = "flag"
    survey: ClassVar[Survey] = "products"

    iterations: int = bounded(5, 1, 100)

    def decide(self, weight_LM: Whole, survey: Doubles, /) -> AggregationDecision:
        norm_LM = np.sqrt(np.maximum(0.0, diagonal(survey)))
        fair_LM, limit_L = shares(weight_LM), weighted_median(norm_LM, weight_LM)
        coefficients_LM = np.zeros(norm_LM.shape)
        # leaves in which the slices of the same members are zero have matrices of one size
        is_there_LM = norm_LM > _LEAST_LENGTH * limit_L[:, None]
        patterns, pattern_L = np.unique(is_there_LM, axis=0, return_inverse=True)
        for index, is_there_M in enumerate(patterns):
            rows, there = np.flatnonzero((pattern_L.ravel() == index) & (limit_L > 0)), np.flatnonzero(is_there_M)
            if rows.size:
                norm_RM, fair_RM = norm_LM[np.ix_(rows, there)], fair_LM[np.ix_(rows, there)]
                gram_RMM = survey[np.ix_(rows, there, there)] / (norm_RM[:, :, None] * norm_RM[:, None, :])
                pull_RM = fair_RM * np.minimum(norm_RM, limit_L[rows, None])
                coefficients_LM[np.ix_(rows, there)] = self._projected(gram_RMM, fair_RM, pull_RM) / norm_RM
        return decided_sum(coefficients_LM, kept_shares(coefficients_LM, fair_LM))

    def _projected(self, gram_LMM: Doubles, fair_LM: Doubles, pull_LM: Doubles) -> Doubles:
        """Return the projection of the sum of `pull_LM` * direction as coefficients of the directions [L, M], whose
        scalar products are `gram_LMM`."""
        num_dimensions = (gram_LMM.shape[1] + 2) // 2
        weight_LM = fair_LM
        for _ in range(self.iterations):
            root_LM = np.sqrt(weight_LM)
            values_LM, vectors_LMM = symmetric_eigen(root_LM[:, :, None] * gram_LMM * root_LM[:, None, :])
            values_LK = values_LM[:, -num_dimensions:]
            is_real_LK = values_LK > _LEAST_VALUE * values_LM[:, -1:]
            scale_LK = np.sqrt(np.where(is_real_LK, values_LK, 1.0))
            # column k holds the coefficients by which the directions make the k-th vector of an orthonormal basis, or
            # zeros
            basis_LMK = root_LM[:, :, None] * vectors_LMM[:, :, -num_dimensions:] / scale_LK[:, None, :]
            basis_LMK = np.where(is_real_LK[:, None, :], basis_LMK, 0.0)
            parts_LMK = matrix_product(gram_LMM, basis_LMK)
            explained_LM = ordered_sum(parts_LMK * parts_LMK)
            weight_LM = fair_LM / np.sqrt(np.maximum(_LEAST_MISS, 1 - explained_LM))
        along_LK1 = matrix_product(parts_LMK.transpose(0, 2, 1), pull_LM[:, :, None])
        return matrix_product(basis_LMK, along_LK1)[:, :, 0]


_MAX_SWEEPS = 12
"""Maximum sweeps. Convergence is quadratic: a matrix of 64 rows takes about 8."""
_NEGLIGIBLE = 1e-14


def symmetric_eigen(a_LMM: Doubles) -> tuple[Doubles, Doubles]:
    """Return the eigenvalues [L, M], ascending, and the eigenvectors as the columns of [L, M, M]. The matrices `a_LMM`
    are symmetric, and the squares of their values are finite. The result for a matrix does not depend on the others."""
    a_LMM, vectors_LMM = a_LMM.copy(), np.zeros(a_LMM.shape)
    vectors_LMM[:] = np.eye(a_LMM.shape[1])
    scale_L, rows = np.abs(a_LMM).max(axis=(1, 2), initial=0.0), np.arange(len(a_LMM))
    for _ in range(_MAX_SWEEPS):
        a_RMM, vectors_RMM = a_LMM[rows], vectors_LMM[rows]
        for low_P, high_P in _rounds(a_LMM.shape[1]):
            cos_RP, sin_RP = _rotations(a_RMM, low_P, high_P)
            for each in (a_RMM, a_RMM.transpose(0, 2, 1), vectors_RMM.transpose(0, 2, 1)):
                _rotate(each, low_P, high_P, cos_RP, sin_RP)
        a_LMM[rows], vectors_LMM[rows] = a_RMM, vectors_RMM
        off_RMM = np.abs(a_RMM) * (1 - np.eye(a_LMM.shape[1]))
        rows = rows[off_RMM.max(axis=(1, 2), initial=0.0) > _NEGLIGIBLE * scale_L[rows]]
        if not rows.size:
            break
    values_LM = diagonal(a_LMM)
    order_LM = np.argsort(values_LM, axis=1, kind="stable")
    return np.take_along_axis(values_LM, order_LM, 1), np.take_along_axis(vectors_LMM, order_LM[:, None, :], 2)


@lru_cache(maxsize=16)
def _rounds(num_rows: int) -> tuple[tuple[NDArray[np.intp], NDArray[np.intp]], ...]:
    """Return the rounds of a round-robin tournament of rows: pairs (low, high), disjoint within a round, in which each
    row meets every other one once."""
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


def _rotations(a_LMM: Doubles, low_P: NDArray[np.intp], high_P: NDArray[np.intp]) -> tuple[Doubles, Doubles]:
    """Return the cosine and sine [L, P] of the rotation that makes each pair's off-diagonal value zero."""
    off_LP = a_LMM[:, low_P, high_P]
    is_off_LP = off_LP != 0
    with np.errstate(over="ignore"):
        ratio_LP = (a_LMM[:, high_P, high_P] - a_LMM[:, low_P, low_P]) / (2 * np.where(is_off_LP, off_LP, 1.0))
        tangent_LP = np.where(ratio_LP < 0, -1.0, 1.0) / (np.abs(ratio_LP) + np.sqrt(1 + ratio_LP * ratio_LP))
    tangent_LP = np.where(is_off_LP, tangent_LP, 0.0)
    cos_LP = 1 / np.sqrt(1 + tangent_LP * tangent_LP)
    return cos_LP, tangent_LP * cos_LP


def _rotate(
    a_LMM: Doubles, low_P: NDArray[np.intp], high_P: NDArray[np.intp], cos_LP: Doubles, sin_LP: Doubles
) -> None:
    """Rotate the pairs of rows of each matrix, in place."""
    low_LPM, high_LPM = a_LMM[:, low_P], a_LMM[:, high_P]
    cos_LP1, sin_LP1 = cos_LP[:, :, None], sin_LP[:, :, None]
    a_LMM[:, low_P] = cos_LP1 * low_LPM - sin_LP1 * high_LPM
    a_LMM[:, high_P] = sin_LP1 * low_LPM + cos_LP1 * high_LPM
