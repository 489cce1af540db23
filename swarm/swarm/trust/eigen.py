"""Eigenvectors of a small symmetric matrix, with the same bits on every machine, which LAPACK does not promise.

Jacobi's method with disjoint rotations in parallel (Golub and Van Loan, Matrix Computations, 4th edition, section
8.5.5): each sweep rotates every pair of rows and columns once, half of the matrix at a time, with nothing but
elementwise operations in fp64, which IEEE 754 rounds alike everywhere. Pure. Shapes: M rows and columns.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from swarm.trust.kernels import Doubles

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
