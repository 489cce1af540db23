"""How far one member that lies moves what an aggregator makes, and what the aggregator costs where nobody lies.

make bench                                             # or alone:
.venv/bin/python -m pytest tests/bench/test_bench_liars.py -m bench -s

Contributions share a direction, and each has noise of its own and a length of its own. Columns, all relative to the
length of the honest members' mean: `honest`, how far the result is from this mean without a liar; then with one liar
among them, which sends their mean backwards (`reversed`), that a thousand times as long (`large`), noise as long as an
honest contribution (`noise`), or a point just within the spread of the honest ones (`hidden`; Baruch et al. 2019, arXiv
1902.06156).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from bench.report import Report
from support.aggregated import aggregate
from swarm.trust.aggregator import AggregationReport
from swarm.trust.kernels import Floats
from swarm.trust.standard_aggregators import DEFAULT_AGGREGATOR, aggregator_names, get_aggregator

pytestmark = pytest.mark.bench

NUM_VALUES = 20_000
NUM_SEEDS = 5
NOISE = 1.0
"""The noise of each member, as long as the shared part. Results of short intervals on other data differ that much."""

Attack = Callable[[Floats, np.random.Generator], Floats]
ATTACKS: dict[str, Attack] = {
    "reversed": lambda x_MN, _: -x_MN.mean(axis=0),
    "large": lambda x_MN, _: -1000 * x_MN.mean(axis=0),
    "noise": lambda x_MN, generator: generator.standard_normal(x_MN.shape[1]) * float(x_MN[0].std()),
    "hidden": lambda x_MN, _: x_MN.mean(axis=0) - x_MN.std(axis=0),
}


def honest(num_members: int, generator: np.random.Generator) -> Floats:
    lengths = generator.uniform(0.8, 1.25, (num_members, 1))
    noise = NOISE * generator.standard_normal((num_members, NUM_VALUES))
    return np.asarray(lengths * (generator.standard_normal(NUM_VALUES) + noise), dtype=np.float32)


def aggregated(name: str, x_MN: Floats, **parameters: float) -> tuple[Floats, AggregationReport]:
    return aggregate(get_aggregator(name, parameters), lambda: [list(x_MN)], (1,) * len(x_MN))


def moved(name: str, num_members: int, attack: Attack | None) -> float:
    """Return the mean distance over several seeds."""
    distances = []
    for seed in range(NUM_SEEDS):
        generator = np.random.default_rng(seed)
        x_MN = honest(num_members, generator)
        truth_N = x_MN.mean(axis=0)
        if attack is not None:
            x_MN = np.vstack((x_MN, attack(x_MN, generator))).astype(np.float32)
        result_N, _ = aggregated(name, x_MN)
        distances.append(float(np.linalg.norm(result_N - truth_N) / np.linalg.norm(truth_N)))
    return float(np.mean(distances))


@pytest.mark.parametrize("num_honest", [4, 8, 15])
def test_one_liar_moves_the_default_aggregator_little_and_it_costs_nothing_without_one(num_honest: int) -> None:
    report = Report(f"one liar among {num_honest} honest members: distance from their mean")
    rows = {}
    for name in aggregator_names():
        if get_aggregator(name, {}).fewest_members() <= num_honest:
            rows[name] = {"honest": moved(name, num_honest, None)}
            rows[name] |= {attack: moved(name, num_honest, of) for attack, of in ATTACKS.items()}
            report.row(name, **rows[name])
    report.show()
    default = rows[DEFAULT_AGGREGATOR]
    assert default["honest"] < 0.05
    assert max(default[attack] for attack in ATTACKS) < 0.75
    assert rows["mean"]["large"] > 50, "a single member must be able to move the mean far"


def test_default_radius_clips_next_to_no_honest_contribution() -> None:
    report, clipped = Report("share of honest contributions that CenteredClip clips"), {}
    for radius in (1.0, 2.0):
        shares = []
        for seed in range(NUM_SEEDS):
            _, told = aggregated("centered_clip", honest(16, np.random.default_rng(seed)), radius=radius)
            shares.append(sum(each < 1 for each in told.kept) / 16)
        clipped[radius] = float(np.mean(shares))
        report.row(f"radius {radius:g}", clipped=clipped[radius])
    report.show()
    assert 0.3 < clipped[1.0] < 0.7
    assert clipped[2.0] < 0.02
