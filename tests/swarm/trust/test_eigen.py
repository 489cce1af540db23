"""Compares eigenvectors with LAPACK's, and bit by bit."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from swarm.trust.flag_aggregator import symmetric_eigen
from swarm.trust.kernels import Doubles


def symmetric(num_rows: int, rank: int, seed: int = 0) -> Doubles:
    x_MR = np.random.default_rng(seed).standard_normal((num_rows, rank))
    return np.asarray(x_MR @ x_MR.T)


def _eigen(a_MM: Doubles) -> tuple[Doubles, Doubles]:
    """Return the eigenvalues and eigenvectors of one matrix, decomposed together with another one."""
    values_LM, vectors_LMM = symmetric_eigen(np.stack([a_MM, np.diag(np.arange(len(a_MM)) + 0.5)]))
    return values_LM[0], vectors_LMM[0]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 40])
@pytest.mark.parametrize("rank", [1, 3, 40])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_eigenvectors_reconstruct_the_matrix(num_rows: int, rank: int, scale: float) -> None:
    a_MM = scale * symmetric(num_rows, rank)
    values_M, vectors_MM = _eigen(a_MM)
    assert np.allclose(vectors_MM.T @ vectors_MM, np.eye(num_rows), atol=1e-12)
    assert np.allclose(vectors_MM @ np.diag(values_M) @ vectors_MM.T, a_MM, rtol=0, atol=1e-11 * np.abs(a_MM).max())
    assert np.allclose(values_M, np.linalg.eigvalsh(a_MM), rtol=0, atol=1e-11 * np.abs(a_MM).max())
    assert (np.diff(values_M) >= 0).all()


@pytest.mark.parametrize("a_MM", [np.zeros((4, 4)), np.eye(5), np.ones((3, 3))])
def test_eigenvectors_of_equal_eigenvalues_are_orthonormal(a_MM: Doubles) -> None:
    values_M, vectors_MM = _eigen(a_MM)
    assert np.allclose(vectors_MM.T @ vectors_MM, np.eye(len(a_MM)), atol=1e-12)
    assert np.allclose(vectors_MM @ np.diag(values_M) @ vectors_MM.T, a_MM, atol=1e-12)


def test_eigenvectors_have_the_same_bytes_on_every_machine() -> None:
    index_M = np.arange(7.0)
    a_MM = (index_M[:, None] * 3 + index_M[None] * 3 + index_M[:, None] * index_M[None]) % 11 + 7 * np.eye(7)
    digest = hashlib.sha256(b"".join(each.tobytes() for each in _eigen(a_MM))).hexdigest()
    assert digest[:16] == "c236a1e00fac8a95"
