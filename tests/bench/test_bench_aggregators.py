"""What a part's owner spends on aggregating, per byte of the slices that it decoded. One core computes.

make bench                                             # or alone:
.venv/bin/python -m pytest tests/bench/test_bench_aggregators.py -m bench -s

Columns: `equal` where all members trained on as many tokens, `own` where each has its own weight.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from bench.report import Report
from support.aggregated import aggregate
from swarm.training.allreduce.parts import FRAME_VALUES
from swarm.trust.aggregator import Aggregator
from swarm.trust.kernels import Floats
from swarm.trust.mixing import Bucketing, NearestNeighbours
from swarm.trust.standard_aggregators import aggregator_names, get_aggregator

pytestmark = pytest.mark.bench

NUM_VALUES = 4_000_000
NUM_REPEATS = 3
LEAST_GB_PER_S = 0.05
"""12.5M values/s, which is what an owner receives in int8 over 100 Mbit/s from all members together."""


def frames(x_MN: Floats) -> Iterator[list[Floats]]:
    for start in range(0, NUM_VALUES, FRAME_VALUES):
        yield list(x_MN[:, start : start + FRAME_VALUES])


def gb_per_s(aggregator: Aggregator, x_MN: Floats, weights: Sequence[int]) -> float:
    times = []
    for _ in range(NUM_REPEATS):
        since = time.perf_counter()
        aggregate(aggregator, lambda: frames(x_MN), weights)
        times.append(time.perf_counter() - since)
    return float(x_MN.nbytes / 1e9 / statistics.median(times))


@pytest.mark.parametrize("num_members", [4, 16])
def test_aggregators_keep_up_with_an_owners_incoming_traffic(num_members: int) -> None:
    report = Report(f"aggregation of {num_members} slices of 4M values")
    x_MN = np.random.default_rng(0).standard_normal((num_members, NUM_VALUES), dtype=np.float32)
    rules = {name: get_aggregator(name, {}) for name in aggregator_names()}
    rules |= {
        f"{mixing.name}, {name}": get_aggregator(name, {}, mixing)
        for mixing, name in product((NearestNeighbours(), Bucketing(liar_share=0.2)), ("centered_clip", "trimmed_mean"))
    }
    for name, aggregator in rules.items():
        figures = {
            "equal_GB_per_s": gb_per_s(aggregator, x_MN, (4096,) * num_members),
            "own_GB_per_s": gb_per_s(aggregator, x_MN, [4096 + 128 * member for member in range(num_members)]),
        }
        report.row(name, **figures)
        assert min(figures.values()) > LEAST_GB_PER_S, name
    report.show()
