"""Tests that equal bytes count as exact, rounding as close, and any other contribution as wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.wrong_reduction import CODEC, GROUP, NUM_VALUES
from swarm.training.allreduce.parts import leaf_at
from swarm.training.evidence.wrong_interval import Likeness, likeness
from swarm_protocol.reduction_messages import AuditedSlice
from torch import Tensor

LEAVES = (0, 3, 4, 9)
GENERATOR = torch.Generator().manual_seed(3)
TRUE_N = torch.randn(NUM_VALUES, generator=GENERATOR)
OTHER_N = torch.randn(NUM_VALUES, generator=GENERATOR)


def of(claimed_N: Tensor, mine_N: Tensor = TRUE_N) -> Likeness:
    slices = [AuditedSlice(data=CODEC.encode(claimed_N[leaf_at(NUM_VALUES, leaf)])) for leaf in LEAVES]
    return likeness(GROUP, CODEC, LEAVES, slices, mine_N, 0.5)


def test_equal_bytes_count_as_exact() -> None:
    assert of(TRUE_N.clone()) == Likeness(tier="exact", distance=0.0)


def test_rounding_counts_as_close() -> None:
    found = of(TRUE_N + 0.1 * OTHER_N)
    assert found.tier == "close"
    assert found.distance == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("lie", "distance"),
    [
        (lambda x_N: -x_N, 2.0),
        (lambda x_N: 10 * x_N, 9.0),
        (lambda x_N: 0.3 * x_N, 0.7),
        (torch.zeros_like, 1.0),
        (lambda _: OTHER_N, math.sqrt(2)),
        (lambda x_N: x_N + 10 * torch.nn.functional.one_hot(torch.tensor(7), NUM_VALUES) * 30, 3.0),
    ],
    ids=["turned round", "times ten", "shrunk", "zero", "another", "one value"],
)
def test_lie_counts_as_wrong(lie: Callable[[Tensor], Tensor], distance: float) -> None:
    found = of(lie(TRUE_N))
    assert found.tier == "wrong"
    assert found.distance > 0.9 * distance


def test_claimed_contribution_counts_as_wrong_when_the_recomputed_one_is_zero() -> None:
    zeros_N = torch.zeros(NUM_VALUES)
    assert of(zeros_N, zeros_N).tier == "exact"
    assert of(TRUE_N, zeros_N) == Likeness(tier="wrong", distance=math.inf)


@pytest.mark.parametrize("data", [b"", b"\x00", bytes([255]) * len(CODEC.encode(TRUE_N[leaf_at(NUM_VALUES, 0)]))])
def test_undecodable_slice_counts_as_wrong(data: bytes) -> None:
    """Its member has committed to it. A member that computes the interval once more must not fail on it."""
    found = likeness(GROUP, CODEC, (0,), [AuditedSlice(data=data)], TRUE_N, 0.5)
    assert found == Likeness(tier="wrong", distance=math.inf)
