"""Compares aggregators with fp64 references, with liars among the members, and bit by bit."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.aggregated import aggregate
from swarm.trust.aggregator import AggregationReport
from swarm.trust.kernels import Doubles, Floats, centred, median_cut, network, products, squares, trimmed_mean
from swarm.trust.leaf_aggregation import Aggregation
from swarm.trust.mixing import Bucketing, Mixing, NearestNeighbours
from swarm.trust.standard_aggregators import (
    aggregator_names,
    get_aggregator,
    parameter_names,
    parameters_of,
)

ROBUST = ("median", "trimmed_mean", "geometric_median", "centered_clip", "multi_krum")
NUM_VALUES = 500
LARGEST = float(np.finfo(np.float32).max)


def run(
    name: str,
    x_MN: Floats,
    weights: Sequence[int],
    frame_values: int = 1 << 18,
    mixing: Mixing | None = None,
    **parameters: float,
) -> tuple[Floats, AggregationReport]:
    num_values = x_MN.shape[1]

    def frames() -> list[list[Floats]]:
        return [list(x_MN[:, at : at + frame_values]) for at in range(0, num_values, frame_values)]

    return aggregate(get_aggregator(name, parameters, mixing), frames, weights)


def left_out(report: AggregationReport) -> tuple[int, ...]:
    return tuple(member for member, kept in enumerate(report.kept) if kept == 0)


def slices(num_members: int, seed: int = 0, num_values: int = NUM_VALUES) -> Floats:
    """Return the slices of honest members: a shared direction, and individual noise."""
    generator = np.random.default_rng(seed)
    noise = generator.standard_normal((num_members, num_values))
    return np.asarray(generator.standard_normal(num_values) + 0.5 * noise, dtype=np.float32)


# --- references: one vector operation after the other, in fp64 ---


def repeated(x_MN: Doubles, weights: Sequence[int]) -> Doubles:
    """Return the rows repeated by weight, sorted in each coordinate."""
    return np.sort(np.repeat(x_MN, weights, axis=0), axis=0)


def reference_mean(x_MN: Doubles, weights: Sequence[int]) -> Doubles:
    return np.average(x_MN, axis=0, weights=weights)


def reference_norm_clipped_mean(x_MN: Doubles, weights: Sequence[int]) -> Doubles:
    norms = np.linalg.norm(x_MN, axis=1)
    limit = np.sort(np.repeat(norms, weights))[(sum(weights) - 1) // 2]
    return np.average(x_MN * np.minimum(1, limit / norms)[:, None], axis=0, weights=weights)


def reference_median(x_MN: Doubles, weights: Sequence[int]) -> Doubles:
    return np.median(repeated(x_MN, weights), axis=0)


def reference_trimmed_mean(x_MN: Doubles, weights: Sequence[int]) -> Doubles:
    fiftieths, cut = [50 * weight for weight in weights], 17 * sum(weights)
    return np.asarray(repeated(x_MN, fiftieths)[cut:-cut].mean(axis=0))


def reference_geometric_median(x_MN: Doubles, weights: Sequence[int]) -> Doubles:
    point = reference_median(x_MN, weights)
    for _ in range(200):
        pulls = np.array(weights) / np.maximum(1e-12, np.linalg.norm(x_MN - point, axis=1))
        point = np.average(x_MN, axis=0, weights=pulls)
    return point


def reference_centered_clip(x_MN: Doubles, weights: Sequence[int]) -> Doubles:
    point = reference_median(x_MN, weights)
    tau = 2 * np.sort(np.repeat(np.linalg.norm(x_MN - point, axis=1), weights))[(sum(weights) - 1) // 2]
    for _ in range(200):
        way_MN = x_MN - point
        way_MN *= np.minimum(1, tau / np.linalg.norm(way_MN, axis=1))[:, None]
        point = point + np.average(way_MN, axis=0, weights=weights)
    return point


def reference_multi_krum(x_MN: Doubles, weights: Sequence[int], liars: int | None = None) -> Doubles:
    num_members = len(x_MN)
    liars = (num_members - 1) // 3 if liars is None else liars
    liars = min(liars, (num_members - 3) // 2)
    squares = ((x_MN[:, None] - x_MN[None]) ** 2).sum(axis=-1)
    scores = np.sort(squares, axis=1)[:, 1 : num_members - liars - 1].sum(axis=1)
    chosen = np.argsort(scores, kind="stable")[: num_members - liars]
    return np.average(x_MN[chosen], axis=0, weights=np.array(weights)[chosen])


def reference_flag(x_MN: Doubles, weights: Sequence[int]) -> Doubles:
    """Return the flag aggregate by singular value decompositions of the slices."""
    norms, fair = np.linalg.norm(x_MN, axis=1), np.array(weights) / sum(weights)
    limit = np.sort(np.repeat(norms, weights))[(sum(weights) - 1) // 2]
    direction_MN, weight_M = x_MN / norms[:, None], fair
    for _ in range(5):
        basis_KN = np.linalg.svd(direction_MN * np.sqrt(weight_M)[:, None], full_matrices=False)[2]
        basis_KN = basis_KN[: (len(x_MN) + 2) // 2]
        explained_M = ((direction_MN @ basis_KN.T) ** 2).sum(axis=1)
        weight_M = fair / np.sqrt(np.maximum(1e-3, 1 - explained_M))
    mean_N = (direction_MN * (fair * np.minimum(norms, limit))[:, None]).sum(axis=0)
    return np.asarray(basis_KN.T @ (basis_KN @ mean_N))


REFERENCES: dict[str, Callable[[Doubles, Sequence[int]], Doubles]] = {
    "mean": reference_mean,
    "norm_clipped_mean": reference_norm_clipped_mean,
    "median": reference_median,
    "trimmed_mean": reference_trimmed_mean,
    "geometric_median": reference_geometric_median,
    "centered_clip": reference_centered_clip,
    "multi_krum": reference_multi_krum,
    "flag": reference_flag,
}


@pytest.mark.parametrize("name", aggregator_names())
@pytest.mark.parametrize("weights", [(7,) * 5, (3, 9, 1, 4, 8, 2, 6), (5, 5, 5, 5, 5, 5), (1,) * 16])
def test_aggregate_equals_the_fp64_reference(name: str, weights: tuple[int, ...]) -> None:
    x_MN = slices(len(weights))
    x_MN[1] *= -30
    result_N, _ = run(name, x_MN, weights, frame_values=97)
    expected_N = REFERENCES[name](x_MN.astype(np.float64), weights)
    assert np.linalg.norm(result_N - expected_N) <= 2e-5 * np.linalg.norm(expected_N)


def test_multi_krum_equals_the_reference_when_distances_are_similar() -> None:
    for seed in range(50):
        x_MN = slices(9, seed, num_values=2)
        expected_N = reference_multi_krum(x_MN.astype(np.float64), (1,) * 9, liars=3)
        assert np.allclose(run("multi_krum", x_MN, (1,) * 9, liars=3)[0], expected_N, atol=1e-5), seed


def test_geometric_median_has_the_least_sum_of_distances() -> None:
    x_MN = slices(7)
    result_N, _ = run("geometric_median", x_MN, (1,) * 7)

    def cost(point: Doubles | Floats) -> float:
        return float(np.linalg.norm(x_MN.astype(np.float64) - point, axis=1).sum())

    generator = np.random.default_rng(1)
    for _ in range(50):
        assert cost(result_N) < cost(result_N + 0.01 * generator.standard_normal(NUM_VALUES))


# --- liars ---


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("size", [1e6, -1e6, 1e30, LARGEST, -LARGEST])
@pytest.mark.parametrize("num_members", [5, 11])
def test_robust_result_stays_near_the_honest_slices_for_any_slice_of_a_liar(
    name: str, size: float, num_members: int
) -> None:
    honest = slices(num_members - 1)
    x_MN = np.insert(honest, 2, np.full(NUM_VALUES, size, dtype=np.float32), axis=0)
    mean_N = honest.mean(axis=0, dtype=np.float64)
    radius = np.linalg.norm(honest - mean_N, axis=1).max()
    result_N, _ = run(name, x_MN, (10,) * num_members)
    assert np.linalg.norm(result_N - mean_N) < radius
    moved_N, _ = run("mean", x_MN * np.float32(0.1), (10,) * num_members)
    assert np.linalg.norm(moved_N - mean_N) > 100 * radius, "the liar's slice is too small to move even the mean"


@pytest.mark.parametrize("name", ["median", "geometric_median", "centered_clip"])
def test_robust_result_stays_near_the_honest_slices_when_almost_half_of_the_weight_lies(name: str) -> None:
    honest = slices(5)
    x_MN = np.concatenate([np.full((4, NUM_VALUES), 1e6, dtype=np.float32), honest])
    result_N, report = run(name, x_MN, (10,) * 9)
    mean_N = honest.mean(axis=0)
    radius = np.linalg.norm(honest - mean_N, axis=1).max()
    assert np.linalg.norm(result_N - mean_N) < 8 * radius
    assert all(kept < 1e-3 for kept in report.kept[:4])


def test_norm_clipped_result_moves_at_most_by_the_liars_share_of_the_median_norm() -> None:
    honest = slices(4)
    x_MN = np.concatenate([honest, np.full((1, NUM_VALUES), 1e9, dtype=np.float32)])
    result_N, report = run("norm_clipped_mean", x_MN, (1,) * 5)
    without_N = 0.8 * run("norm_clipped_mean", honest, (1,) * 4)[0]
    assert np.linalg.norm(result_N - without_N) < 0.5 * np.linalg.norm(honest, axis=1).max()
    assert 0 < report.kept[4] < 1


def test_multi_krum_leaves_out_and_reports_the_farthest_slices() -> None:
    x_MN = slices(7)
    x_MN[2], x_MN[5] = 100, -100
    result_N, report = run("multi_krum", x_MN, (1, 2, 50, 3, 4, 50, 5), liars=2)
    assert left_out(report) == (2, 5)
    assert np.allclose(result_N, np.average(x_MN[[0, 1, 3, 4, 6]], axis=0, weights=(1, 2, 3, 4, 5)), atol=1e-6)
    assert not report.note


@pytest.mark.parametrize(("num_members", "num_left_out"), [(1, 0), (2, 0), (4, 0), (5, 1), (8, 2), (9, 3)])
def test_multi_krum_leaves_out_and_reports_fewer_when_there_are_too_few_members(
    num_members: int, num_left_out: int
) -> None:
    result_N, report = run("multi_krum", slices(num_members), (1,) * num_members, liars=3)
    assert len(left_out(report)) == num_left_out
    assert bool(report.note) == (num_left_out < 3)
    assert np.isfinite(result_N).all()


def test_multi_krum_keeps_the_earlier_member_when_scores_are_equal() -> None:
    _, report = run("multi_krum", np.ones((5, 8), dtype=np.float32), (1,) * 5)
    assert left_out(report) == (4,)


def test_trimmed_mean_leaves_out_a_liar_with_exactly_the_trimmed_share() -> None:
    for tokens in (1, 7, 40, 999, 12_345_678):
        x_MN = np.ones((5, 4), dtype=np.float32)
        x_MN[3] = LARGEST
        result_N, _ = run("trimmed_mean", x_MN, (tokens,) * 5, trim=0.2)
        assert (result_N == 1).all(), tokens


# --- degenerate inputs ---


@pytest.mark.parametrize("name", aggregator_names())
def test_aggregate_of_one_member_is_its_slice(name: str) -> None:
    x_MN = slices(1)
    result_N, _ = run(name, x_MN, (3,))
    assert np.allclose(result_N, x_MN[0], rtol=1e-6)


@pytest.mark.parametrize("name", aggregator_names())
@pytest.mark.parametrize("num_members", [2, 5])
def test_aggregate_of_equal_slices_is_that_slice(name: str, num_members: int) -> None:
    x_MN = np.repeat(slices(1), num_members, axis=0)
    result_N, report = run(name, x_MN, range(1, num_members + 1))
    assert np.allclose(result_N, x_MN[0], rtol=1e-6)
    if name == "flag":
        assert np.allclose(report.kept, 1.0)
    elif name not in {"multi_krum", "norm_clipped_mean"}:
        assert set(report.kept) <= {1.0}


@pytest.mark.parametrize("name", aggregator_names())
def test_aggregate_of_negative_zeros_is_positive_zero(name: str) -> None:
    result_N, _ = run(name, np.full((5, 9), -0.0, dtype=np.float32), (1, 2, 3, 4, 5))
    assert result_N.tobytes() == bytes(36)


@pytest.mark.parametrize("name", ["median", "geometric_median", "centered_clip", "norm_clipped_mean"])
def test_aggregate_is_zero_when_most_members_send_zeros(name: str) -> None:
    x_MN = np.zeros((5, 9), dtype=np.float32)
    x_MN[:2] = slices(2)[:, :9]
    assert not run(name, x_MN, (1,) * 5)[0].any()


@pytest.mark.parametrize("name", aggregator_names())
def test_aggregate_ignores_members_without_weight(name: str) -> None:
    x_MN = slices(12)
    weights = [0, 0, 3, 0, 4, 0, 0, 5, 0, 3, 2, 0]
    counted = [member for member, weight in enumerate(weights) if weight]
    x_MN[0], x_MN[1, 3] = LARGEST, math.nan
    result_N, report = run(name, x_MN, weights)
    expected_N, expected = run(name, x_MN[counted], [weights[member] for member in counted])
    assert result_N.tobytes() == expected_N.tobytes()
    assert [report.kept[member] for member in counted if report.kept] == list(expected.kept)


def test_aggregation_is_refused_with_a_clear_message_when_nobody_has_weight() -> None:
    with pytest.raises(ValueError, match="no member has any weight"):
        Aggregation(get_aggregator("mean", {}), (0, 0))


@pytest.mark.parametrize("weights", [(1, -1), (1.0, 2), (True, 1)])
def test_aggregation_refuses_weights_that_are_no_counts(weights: Any) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        Aggregation(get_aggregator("mean", {}), weights)


@pytest.mark.parametrize("name", aggregator_names())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_aggregate_names_the_member_whose_slice_is_not_finite(name: str, value: float) -> None:
    x_MN = slices(5)
    x_MN[3, 77] = value
    with pytest.raises(ValueError, match="slice of member 3 holds a value that is not finite"):
        run(name, x_MN, (1,) * 5, frame_values=50)


@pytest.mark.parametrize("rows", [3, 5])
def test_aggregation_refuses_another_number_of_rows_than_members(rows: int) -> None:
    aggregation = Aggregation(get_aggregator("mean", {}), (1,) * 4)
    aggregation.decide()
    with pytest.raises(ValueError, match=r"rows|zip"):
        aggregation.combine(list(slices(rows)))


@pytest.mark.parametrize("name", aggregator_names())
def test_aggregate_of_empty_slices_is_empty(name: str) -> None:
    assert run(name, np.empty((3, 0), dtype=np.float32), (1, 1, 1))[0].size == 0


@pytest.mark.parametrize("name", aggregator_names())
def test_aggregate_is_equal_for_large_and_small_weights_in_the_same_ratio(name: str) -> None:
    x_MN = slices(5)
    for small in ((1, 2, 3, 4, 4), (1, 2, 3, 4, 5)):
        result_N, _ = run(name, x_MN, small)
        large_N, _ = run(name, x_MN, [each * 2 * 10**13 for each in small])
        assert result_N.tobytes() == large_N.tobytes()
    uneven_N, _ = run(name, x_MN, [each * 2 * 10**13 - 1 for each in small])
    assert np.allclose(result_N, uneven_N, atol=1e-5)


# --- bits ---


def pattern(num_members: int, num_values: int) -> Floats:
    """Return values made from whole numbers alone, independent of any library's generator."""
    index = np.arange(num_members * num_values, dtype=np.uint64)
    mixed = (index * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)) >> np.uint64(40)
    x_N = (mixed.astype(np.float64) / 2**23 - 1).astype(np.float32)
    x_MN: Floats = x_N.reshape(num_members, num_values)
    x_MN[0] *= 40
    return x_MN


GOLDEN = {
    "mean": "cebc5e58b4d8475d",
    "norm_clipped_mean": "8dc33bbfb4c4b2d1",
    "median": "c921cccbe19988a6",
    "trimmed_mean": "8251b76e6a65266f",
    "geometric_median": "8d59818f47721647",
    "centered_clip": "de7ab6d5804fefb0",
    "multi_krum": "6613c671039e92cd",
    "flag": "a8777ebd368be6d2",
}
"""Digests of the results of the next test, equal on every machine."""


@pytest.mark.parametrize("name", aggregator_names())
def test_aggregate_gives_the_same_bytes_on_every_machine(name: str) -> None:
    result_N, _ = run(name, pattern(6, 20_000), (5, 7, 7, 1, 9, 4), frame_values=12_000)
    assert hashlib.sha256(result_N.tobytes()).hexdigest()[:16] == GOLDEN[name]


@pytest.mark.parametrize(
    "mixing", [None, NearestNeighbours(), Bucketing(liar_share=0.2)], ids=["none", "near", "bucket"]
)
@pytest.mark.parametrize("name", aggregator_names())
def test_leaf_has_the_same_bytes_alone_as_among_others(name: str, mixing: Mixing | None) -> None:
    """An auditor computes one leaf of a part, while the owner computes many at a time."""
    num_leaves, leaf_values, weights = 9, 300, (5, 7, 7, 1, 9, 4, 0)
    x_MLV = pattern(7, num_leaves * leaf_values).reshape(7, num_leaves, leaf_values)
    x_MLV[3, 2] = 0.0
    x_MLV[:4, 4] = 0.0  # the median distance is 0 where most of the weight agrees
    x_MLV[2:6, 5] = x_MLV[1, 5]
    x_MLV[1, 6] *= 1000
    beacons, kind = [bytes([leaf]) for leaf in range(num_leaves)], get_aggregator(name, {}, mixing)
    together = Aggregation(kind, weights, beacons)
    rows = [x_LV.ravel() for x_LV in x_MLV]
    if together.has_survey:
        together.survey(rows)
    kept, alone = together.decide().kept, list[tuple[float, ...]]()
    result_LV = together.combine(rows).reshape(num_leaves, leaf_values)
    for leaf, beacon in enumerate(beacons):
        expected_V, report = aggregate(kind, lambda leaf=leaf: [list(x_MLV[:, leaf])], weights, beacon)  # type: ignore[misc]
        assert result_LV[leaf].tobytes() == expected_V.tobytes(), leaf
        alone.append(report.kept)
    if all(alone):
        assert np.allclose(kept, np.mean(alone, axis=0))


def test_products_do_not_depend_on_the_order_of_summation() -> None:
    x_MN = slices(5, num_values=8192)
    expected_1MM = products(x_MN[None])
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(8192)
        assert (products(x_MN[None, :, order]) == expected_1MM).all()
        assert squares(x_MN[:1, order]) == expected_1MM[:, 0, 0]


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e19, 1e38])
def test_products_equal_those_in_fp64_to_a_millionth(scale: float) -> None:
    x_MN = np.asarray(slices(4, num_values=20_001) / 8 * scale, dtype=np.float32)
    expected_MM = x_MN.astype(np.float64) @ x_MN.astype(np.float64).T
    assert np.abs(products(x_MN[None])[0] - expected_MM).max() <= 1e-6 * expected_MM.max()


@pytest.mark.parametrize("num_members", range(1, 18))
def test_network_sorts_all_inputs(num_members: int) -> None:
    """By the zero-one principle, a network that sorts all zeros and ones sorts all inputs (up to 2^17 of them here)."""
    numbers = np.arange(1 << num_members, dtype=np.uint32)
    rows = [(numbers >> np.uint32(bit)) & np.uint32(1) for bit in range(num_members)]
    for low, high in network(num_members):
        assert low < high
        rows[low], rows[high] = np.minimum(rows[low], rows[high]), np.maximum(rows[low], rows[high])
    assert all((low <= high).all() for low, high in itertools.pairwise(rows))


def test_trimmed_mean_of_256_members_equals_the_reference() -> None:
    weights = [1 + member % 3 for member in range(256)]
    x_MF = slices(256, num_values=40)
    expected_F = repeated(x_MF.astype(np.float64), weights)[100:-100].mean(axis=0)
    assert np.allclose(trimmed_mean(x_MF, weights, 100), expected_F, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "weights", "cut", "expected"),
    [
        ((1, 9), (2, 1), 1, 1),
        ((9, 1), (2, 1), 1, 9),
        ((1, 9, 5), (1, 2, 1), 1, 7),
        ((1, 9, 5), (3, 3, 2), 3, 5),
        ((5, 5, 1), (4, 1, 4), 4, 5),
        ((-1, 1), (3, 1), 0, -0.5),
    ],
)
def test_trimmed_mean_uses_the_remaining_weight_of_each_member(
    values: Sequence[float], weights: Sequence[int], cut: int, expected: float
) -> None:
    x_MF = np.array(values, dtype=np.float32)[:, None]
    assert trimmed_mean(x_MF, weights, cut).tolist() == [expected]


def test_decide_cuts_nothing_of_a_single_token() -> None:
    assert get_aggregator("trimmed_mean", {}).decide(np.ones((1, 1), dtype=np.int64), np.zeros(1)).cut_L == [0]


def test_centred_stays_within_the_range_of_fp32() -> None:
    x_MF = np.array([[LARGEST, 1.0], [-LARGEST, 3.0]], dtype=np.float32)
    centre_F = np.array([-LARGEST, 2.0], dtype=np.float32)
    assert centred(x_MF, centre_F).tolist() == [[LARGEST, -1.0], [0.0, 1.0]]


@pytest.mark.parametrize("cut", [-1, 2, 3])
def test_trimmed_mean_refuses_to_cut_everything(cut: int) -> None:
    with pytest.raises(ValueError, match="nothing is left"):
        trimmed_mean(slices(4), (1,) * 4, cut)


@st.composite
def parts(draw: st.DrawFn) -> tuple[Floats, list[int]]:
    num_members = draw(st.integers(1, 9))
    value = st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([0.0, 1.0, -1.0, 1e30, -1e30]))
    row = st.lists(value, min_size=6, max_size=6)
    x_MN = np.array(draw(st.lists(row, min_size=num_members, max_size=num_members)), dtype=np.float32)
    return x_MN, draw(st.lists(st.integers(1, 50), min_size=num_members, max_size=num_members))


@settings(max_examples=60, deadline=None)
@given(parts(), st.sampled_from(aggregator_names()), st.randoms(use_true_random=False))
def test_aggregate_stays_among_the_slices_and_does_not_depend_on_their_order(
    part: tuple[Floats, list[int]], name: str, random: Any
) -> None:
    x_MN, weights = part
    result_N, report = run(name, x_MN, weights)
    smallest = np.finfo(np.float32).tiny  # smaller numbers have fewer digits
    slack = 1e-5 * np.abs(x_MN).max(axis=0) + smallest
    low_N, high_N = x_MN.min(axis=0), x_MN.max(axis=0)
    if name == "norm_clipped_mean":  # it lies among the slices and zero
        low_N, high_N = np.minimum(low_N, 0), np.maximum(high_N, 0)
    if name == "flag":  # it is a projection of a value among the slices
        assert np.linalg.norm(result_N.astype(np.float64)) <= np.linalg.norm(x_MN.astype(np.float64), axis=1).max() * (
            1 + 1e-5
        )
    else:
        assert (low_N - slack <= result_N).all()
        assert (result_N <= high_N + slack).all()
    assert all(0 <= kept <= 1 for kept in report.kept)
    assert result_N.tobytes() == run(name, x_MN, weights)[0].tobytes()
    if name in {"multi_krum", "flag"}:  # with equal scores the earlier member stays, with equal directions some of them
        return
    order = random.sample(range(len(weights)), len(weights))
    other_N, _ = run(name, x_MN[order], [weights[member] for member in order])
    if name in {"median", "trimmed_mean"}:
        assert (other_N == result_N).all()
    assert (np.abs(other_N - result_N) <= 2e-4 * np.abs(x_MN).max() + smallest).all()


@pytest.mark.parametrize("name", aggregator_names())
def test_aggregate_is_finite_when_a_slice_has_the_smallest_numbers(name: str) -> None:
    x_MN = np.random.default_rng(0).normal(0, 1e-3, (5, 64)).astype(np.float32)
    x_MN[4] = 0
    x_MN[4, 7] = np.finfo(np.float32).smallest_subnormal
    result_N, _ = run(name, x_MN, [1000] * 5)
    assert np.isfinite(result_N).all()


@settings(max_examples=60, deadline=None)
@given(parts(), st.data())
def test_trimmed_mean_equals_the_reference(part: tuple[Floats, list[int]], data: st.DataObject) -> None:
    x_MN, weights = part
    cut = data.draw(st.integers(0, median_cut(weights)))
    sorted_WN = repeated(x_MN.astype(np.float64), weights)
    expected_N = sorted_WN[cut : sum(weights) - cut].mean(axis=0)
    slack_N = 1e-6 * np.abs(sorted_WN[cut : sum(weights) - cut]).max(axis=0)
    assert (np.abs(trimmed_mean(x_MN, weights, cut) - expected_N) <= slack_N + 1e-12).all()


@pytest.mark.parametrize("name", ["mean", "median", "trimmed_mean"])
def test_coordinatewise_aggregate_does_not_depend_on_the_frames(name: str) -> None:
    x_MN = slices(5)
    whole_N, _ = run(name, x_MN, (1, 2, 3, 4, 5))
    assert whole_N.tobytes() == run(name, x_MN, (1, 2, 3, 4, 5), frame_values=33)[0].tobytes()


@pytest.mark.parametrize("name", ["mean", "norm_clipped_mean", "geometric_median", "multi_krum"])
def test_combine_needs_only_one_row_at_a_time(name: str) -> None:
    x_MN = slices(5)
    aggregation = Aggregation(get_aggregator(name, {}), (1, 2, 3, 4, 5))
    buffer_N = np.empty(NUM_VALUES, dtype=np.float32)

    def reused() -> Iterator[Floats]:
        for row_N in x_MN:
            buffer_N[:] = row_N
            yield buffer_N

    if aggregation.has_survey:
        aggregation.survey(reused() if name == "norm_clipped_mean" else iter(x_MN))
    aggregation.decide()
    expected_N, _ = run(name, x_MN, (1, 2, 3, 4, 5))
    assert aggregation.combine(reused()).tobytes() == expected_N.tobytes()


# --- parameters ---


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("trimmed_mean", {"trim": 0.5}),
        ("trimmed_mean", {"trim": -0.1}),
        ("trimmed_mean", {"trim": math.nan}),
        ("trimmed_mean", {"trim": "0.1"}),
        ("trimmed_mean", {"trim": True}),
        ("multi_krum", {"liars": 1.0}),
        ("multi_krum", {"liars": True}),
        ("multi_krum", {"liars": 127}),
        ("centered_clip", {"radius": 0.0}),
        ("centered_clip", {"iterations": 0}),
        ("geometric_median", {"smoothing": 0.0}),
        ("norm_clipped_mean", {"ratio": 11}),
    ],
)
def test_aggregator_refuses_an_impossible_parameter_and_names_it(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(parameters))} = .*: use a "):
        get_aggregator(name, parameters)


def test_aggregator_refuses_an_unknown_parameter() -> None:
    with pytest.raises(ValueError, match="median has no parameter 'trim'"):
        get_aggregator("median", {"trim": 0.1})


@pytest.mark.parametrize("name", aggregator_names())
def test_aggregator_can_be_rebuilt_from_its_parameters(name: str) -> None:
    parameters = parameters_of(get_aggregator(name, {}))
    assert tuple(parameters) == parameter_names(name)
    assert get_aggregator(name, parameters) == get_aggregator(name, {})
