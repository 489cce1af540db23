"""What one member that lies does to a run, by aggregator: the validation loss, beside that of a run without a liar.

    .venv/bin/python -m pytest tests/bench/test_bench_lying_run.py -m bench -s

Five and eight replicas of a Llama of 21k parameters on the standard library's source, 10 outer steps of 8 inner ones,
with the default outer optimizer and int8 both ways; one of them sends, in every round, what `lying_run.LIES` makes of
its own contribution and of the honest ones. Aggregators have their default parameters and work on each leaf.
`least kept` is the share of its pull that the worst treated honest contribution kept in runs without a liar.

The default aggregator is to end within CLOSE of the mean without a liar, whatever the lie. Losses of runs that differ
in nothing but rounding are some hundredths apart. Takes 80 CPU seconds with five members, 110 with eight (-k "[5]").
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import pytest
from bench.lying_run import LIES, Ending, Trial, ending
from bench.report import Report
from swarm.trust.mixing import DEFAULT_MIXING, NO_MIXING
from swarm.trust.standard_aggregators import DEFAULT_AGGREGATOR

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

RULES = (
    ("mean", NO_MIXING),
    ("norm_clipped_mean", NO_MIXING),
    ("centered_clip", NO_MIXING),
    ("trimmed_mean", NO_MIXING),
    ("multi_krum", NO_MIXING),
    (DEFAULT_AGGREGATOR, DEFAULT_MIXING),
)
CLOSE = 0.1
"""Nats a byte."""
LEAST_KEPT = 0.6


@pytest.mark.parametrize("size", [5, 8])
def test_default_aggregator_trains_on_whatever_one_member_sends_and_costs_nothing_without_a_liar(size: int) -> None:
    trials = [
        Trial(aggregator=aggregator, mixing=mixing, lie=lie, num_members=size)
        for (aggregator, mixing), lie in product(RULES, LIES)
    ]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        endings = dict(zip(trials, pool.map(ending, trials), strict=True))
    _show(size, endings)
    honest = endings[Trial(aggregator="mean", lie="none", num_members=size)].loss
    ours = {
        lie: endings[Trial(aggregator=DEFAULT_AGGREGATOR, mixing=DEFAULT_MIXING, lie=lie, num_members=size)]
        for lie in LIES
    }
    assert max(each.loss for each in ours.values()) < honest + CLOSE
    assert ours["none"].least_kept >= LEAST_KEPT
    assert endings[Trial(aggregator="mean", lie="scaled", num_members=size)].loss > honest + 1


def _show(size: int, endings: dict[Trial, Ending]) -> None:
    report = Report(f"Validation loss in nats a byte, one liar of {size}")
    for (aggregator, mixing), lie in product(RULES, LIES):
        found = endings[Trial(aggregator=aggregator, mixing=mixing, lie=lie, num_members=size)]
        name = aggregator if mixing == NO_MIXING else f"{mixing}, {aggregator}"
        report.row(name, **{lie.replace(" ", "_"): f"{found.loss:.2f}"})
        if lie == "none":
            report.row(name, least_kept=found.least_kept)
    report.show()
