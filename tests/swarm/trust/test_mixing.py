"""Tests pre-aggregation: which slices are mixed, what liars can still do, and equal bits on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from support.aggregated import aggregate
from swarm.trust.aggregator import AggregationReport
from swarm.trust.kernels import Floats, products
from swarm.trust.mixing import Bucketing, Mixing, NearestNeighbours, get_mixing, leaf_beacon, mixing_names
from swarm.trust.standard_aggregators import aggregator_names, get_aggregator

ROBUST = ("median", "trimmed_mean", "geometric_median", "centered_clip", "multi_krum")
NUM_VALUES = 400
BEACON = leaf_beacon("run", 3, bytes(32), 7)
MIXINGS: tuple[Mixing, ...] = (NearestNeighbours(), Bucketing(liar_share=0.2))


def run(
    name: str, mixing: Mixing, x_MN: Floats, weights: Sequence[int], frame_values: int = 1 << 18, beacon: bytes = BEACON
) -> tuple[Floats, AggregationReport]:
    frames = [list(x_MN[:, at : at + frame_values]) for at in range(0, x_MN.shape[1], frame_values)]
    return aggregate(get_aggregator(name, {}, mixing), lambda: frames, weights, beacon)


def slices(num_members: int, noise: float = 0.5, seed: int = 0) -> Floats:
    """Return the slices of honest members: a shared direction, and individual noise."""
    generator = np.random.default_rng(seed)
    own_MN = generator.standard_normal((num_members, NUM_VALUES))
    return np.asarray(generator.standard_normal(NUM_VALUES) + noise * own_MN, dtype=np.float32)


def shares(mixing: Mixing, x_MN: Floats, weights: Sequence[int], beacon: bytes = BEACON) -> list[list[float]]:
    return mixing.mix(weights, products(x_MN[None]), [beacon]).shares_LKM[0].tolist()  # type: ignore[no-any-return]


# --- nearest neighbours ---


def test_nearest_neighbours_without_reach_are_those_of_the_paper() -> None:
    x_MN = slices(10)
    x_MN[3:6] += 1.0
    squares_MM = ((x_MN[:, None].astype(np.float64) - x_MN[None]) ** 2).sum(axis=-1)
    for row_M, squares_M in zip(shares(NearestNeighbours(reach=1.0), x_MN, (5,) * 10), squares_MM, strict=True):
        nearest = set(np.argsort(squares_M, kind="stable")[:7].tolist())
        assert row_M == [1 / 7 if member in nearest else 0.0 for member in range(10)]


def test_nearest_neighbours_include_slices_hardly_farther_away() -> None:
    x_MN = np.array([[0.0], [1.0], [1.15], [1.3]], dtype=np.float32)
    mixing = NearestNeighbours(liar_share=0.5, reach=1.2)
    assert shares(mixing, x_MN, (1,) * 4)[0] == [1 / 3] * 2 + [1 / 3, 0.0]
    wide = NearestNeighbours(liar_share=0.5, reach=1.4)
    assert shares(wide, x_MN, (1,) * 4)[0] == [0.25] * 4


def test_nearest_neighbours_are_counted_by_weight() -> None:
    x_MN = np.array([[0.0], [1.0], [5.0], [50.0]], dtype=np.float32)
    rows = shares(NearestNeighbours(), x_MN, (6, 2, 1, 1))
    assert rows[0] == [6 / 8, 2 / 8, 0.0, 0.0]
    assert rows[2] == [6 / 9, 2 / 9, 1 / 9, 0.0]


@pytest.mark.parametrize(("num_members", "num_liars"), [(3, 1), (4, 1), (7, 2), (10, 3)])
@pytest.mark.parametrize("size", [1e4, -1e30])
@pytest.mark.parametrize("name", ROBUST)
def test_result_stays_among_honest_slices_when_a_third_lie_far_away(
    name: str, size: float, num_members: int, num_liars: int
) -> None:
    if get_aggregator(name, {}).fewest_members() > num_members:
        pytest.skip("the aggregator needs more members")
    x_MN = slices(num_members)
    honest_HN = x_MN[num_liars:].copy()
    x_MN[:num_liars] = size
    mean_N = honest_HN.mean(axis=0, dtype=np.float64)
    radius = np.linalg.norm(honest_HN - mean_N, axis=1).max()
    result_N, report = run(name, NearestNeighbours(), x_MN, (10,) * num_members)
    assert np.linalg.norm(result_N - mean_N) <= radius * (1 + 1e-5)
    assert all(kept < 1e-3 for kept in report.kept[:num_liars])


def test_liars_among_the_honest_slices_displace_no_honest_slice() -> None:
    """They are the nearest of all. With a fixed number of neighbours, they displace three of ten honest slices."""
    x_MN = slices(10, noise=1.0)
    x_MN[7:] = x_MN[:7].mean(axis=0)
    _, paper = run("centered_clip", NearestNeighbours(reach=1.0), x_MN, (1,) * 10)
    _, report = run("centered_clip", NearestNeighbours(), x_MN, (1,) * 10)
    assert report.kept == (1.0,) * 10
    assert sum(paper.kept[:7]) < 6


@pytest.mark.parametrize("num_members", [2, 3, 5, 10, 16])
def test_mixing_keeps_the_mean_when_nobody_lies(num_members: int) -> None:
    x_MN = slices(num_members)
    result_N, report = run("centered_clip", NearestNeighbours(), x_MN, (4,) * num_members)
    assert min(report.kept) > 0.99
    assert np.allclose(result_N, x_MN.mean(axis=0), atol=1e-5)


# --- bucketing ---


@pytest.mark.parametrize(
    ("num_members", "liar_share", "size"),
    [(10, 0.34, 1), (10, 0.2, 2), (10, 0.1, 3), (3, 0.34, 1), (2, 0.1, 1), (64, 0.1, 4)],
)
def test_buckets_are_as_large_as_possible_with_a_majority_free_of_liars(
    num_members: int, liar_share: float, size: int
) -> None:
    mixing, weights = Bucketing(liar_share=liar_share), tuple(range(1, num_members + 1))
    assert mixing.bucket_size(num_members) == size
    mixed = mixing.mix(weights, np.zeros(1), [BEACON])
    members = [np.flatnonzero(row_M).tolist() for row_M in mixed.shares_LKM[0]]
    assert sorted(chain.from_iterable(members)) == list(range(num_members))
    assert max(map(len, members)) <= size
    assert len(members) > 2 * int(liar_share * num_members)
    assert mixed.weight_LK[0].tolist() == [sum(weights[member] for member in bucket) for bucket in members]
    assert np.allclose(mixed.shares_LKM.sum(axis=2), 1)


def test_buckets_differ_for_each_leaf_step_state_and_run() -> None:
    beacons = [
        leaf_beacon(run, step, digest, leaf)
        for run, step, digest, leaf in (
            ("run", 3, bytes(32), 7),
            ("run", 3, bytes(32), 8),
            ("run", 4, bytes(32), 7),
            ("run", 3, b"\1" * 32, 7),
            ("other", 3, bytes(32), 7),
        )
    ]
    mixing, x_MN = Bucketing(liar_share=0.1), slices(12)
    drawn = [str(shares(mixing, x_MN, (1,) * 12, beacon)) for beacon in beacons]
    assert len(set(drawn)) == len(beacons)
    assert drawn[0] == str(shares(mixing, x_MN, (1,) * 12, beacons[0]))


# --- with any aggregator ---


@pytest.mark.parametrize("mixing", MIXINGS, ids=lambda mixing: mixing.name)
@pytest.mark.parametrize("name", ["mean", "median", "trimmed_mean", "norm_clipped_mean", "multi_krum", "flag"])
def test_aggregate_equals_that_of_the_mixed_slices(name: str, mixing: Mixing) -> None:
    x_MN, weights = slices(9), (3, 9, 1, 4, 8, 2, 6, 5, 7)
    x_MN[1] *= -30
    mixed = mixing.mix(weights, products(x_MN[None]), [BEACON])
    mixed_KN = np.asarray(mixed.shares_LKM[0] @ x_MN.astype(np.float64), dtype=np.float32)
    expected_N, _ = aggregate(get_aggregator(name, {}), lambda: [list(mixed_KN)], mixed.weight_LK[0].tolist())
    result_N, _ = run(name, mixing, x_MN, weights)
    assert np.linalg.norm(result_N - expected_N) <= 1e-4 * np.linalg.norm(expected_N)


@pytest.mark.parametrize("mixing", MIXINGS, ids=lambda mixing: mixing.name)
@pytest.mark.parametrize("name", aggregator_names())
def test_aggregate_of_mixed_slices_ignores_members_without_weight(name: str, mixing: Mixing) -> None:
    x_MN, weights = slices(9), [0, 5, 3, 0, 4, 2, 6, 0, 1]
    counted = [member for member, weight in enumerate(weights) if weight]
    x_MN[0], x_MN[3, 5] = 1e30, np.nan
    result_N, report = run(name, mixing, x_MN, weights)
    expected_N, expected = run(name, mixing, x_MN[counted], [weights[member] for member in counted])
    assert result_N.tobytes() == expected_N.tobytes()
    assert [report.kept[member] for member in counted if report.kept] == list(expected.kept)


@pytest.mark.parametrize("name", aggregator_names())
@pytest.mark.parametrize("mixing", MIXINGS, ids=lambda mixing: mixing.name)
@pytest.mark.parametrize("num_members", [1, 2, 5])
def test_aggregate_of_equal_slices_is_that_slice_and_of_zeros_zero(name: str, mixing: Mixing, num_members: int) -> None:
    x_MN = np.repeat(slices(1), num_members, axis=0)
    assert np.allclose(run(name, mixing, x_MN, range(1, num_members + 1))[0], x_MN[0], rtol=1e-5)
    assert not run(name, mixing, np.zeros_like(x_MN), range(1, num_members + 1))[0].any()


def pattern(num_members: int, num_values: int) -> Floats:
    """Return values made from whole numbers alone, independent of any library's generator."""
    index = np.arange(num_members * num_values, dtype=np.uint64)
    mixed = (index * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)) >> np.uint64(40)
    x_MN: Floats = (mixed.astype(np.float64) / 2**23 - 1).astype(np.float32).reshape(num_members, num_values)
    x_MN[0] *= 40
    x_MN[1:] *= (
        1 + np.arange(num_members - 1, dtype=np.float32)[:, None] / 4
    )  # so that members have different neighbours
    return x_MN


GOLDEN = {
    ("nearest_neighbours", "mean"): "031fb08dce1cc1b0",
    ("nearest_neighbours", "norm_clipped_mean"): "dd5dae6ce13c2e14",
    ("nearest_neighbours", "median"): "44aef9281c60408a",
    ("nearest_neighbours", "trimmed_mean"): "a4b374ccf7db9ec7",
    ("nearest_neighbours", "geometric_median"): "a511093635db1852",
    ("nearest_neighbours", "centered_clip"): "b2326a0778501eb7",
    ("nearest_neighbours", "multi_krum"): "3f90b82a8098181a",
    ("nearest_neighbours", "flag"): "dd5dae6ce13c2e14",
    ("bucketing", "mean"): "9bbefbfadebaa3eb",
    ("bucketing", "norm_clipped_mean"): "dd91cac82994b669",
    ("bucketing", "median"): "1c1518f831cd2ff4",
    ("bucketing", "trimmed_mean"): "e6aa997e7c581d3f",
    ("bucketing", "geometric_median"): "3a83e331dd031507",
    ("bucketing", "centered_clip"): "6357bf169d9da9a2",
    ("bucketing", "multi_krum"): "9bbefbfadebaa3eb",
    ("bucketing", "flag"): "394a6d92a2801fad",
}
"""Digests of the results of the next test, equal on every machine."""


@pytest.mark.parametrize("mixing", MIXINGS, ids=lambda mixing: mixing.name)
@pytest.mark.parametrize("name", aggregator_names())
def test_aggregate_of_mixed_slices_gives_the_same_bytes_on_every_machine(name: str, mixing: Mixing) -> None:
    result_N, _ = run(name, mixing, pattern(9, 20_000), (5, 7, 7, 1, 9, 4, 3, 8, 2), frame_values=12_000)
    assert hashlib.sha256(result_N.tobytes()).hexdigest()[:16] == GOLDEN[mixing.name, name]


def test_get_mixing_gives_the_mixing_of_each_name() -> None:
    found = [get_mixing(name, liar_share=0.2, reach=1.5) for name in mixing_names()]
    assert found == [None, Bucketing(liar_share=0.2), NearestNeighbours(liar_share=0.2, reach=1.5)]
