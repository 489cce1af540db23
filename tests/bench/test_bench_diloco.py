"""What talking seldom costs: the validation loss of DiLoCo and of streaming DiLoCo beside data parallel's.

    .venv/bin/python -m pytest tests/bench/test_bench_diloco.py -m bench -s

Four replicas of the default model (1.1M parameters) on the standard library's source, after equal tokens. Data parallel
is one replica with the windows of all four in a step. As in DiLoCo's paper (Douillard et al. 2023, arXiv 2311.08105,
section 3), all begin with the same pretrained weights, here a data-parallel run's at a constant rate; each then has
fresh moments and the same cosine. Steps are small, a window for each replica, so that there are tens of outer steps in
some minutes of two cores. The curves are drawn into build/diloco.svg.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from bench.curves import Curve, Method, draw, train
from bench.report import Report, aim
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import InnerConfig, OuterConfig
from torch import Tensor

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]

NUM_REPLICAS = 4
PRETRAINING_STEPS, INNER_STEPS = 1000, 3000
BATCH_WINDOWS = 1
PLOT = Path("build/diloco.svg")
MOST_DILOCO, MOST_STREAMING = 1.01, 1.015

INNER = InnerConfig(
    batch_windows=BATCH_WINDOWS, learning_rate=4e-3, warmup_steps=30, schedule="cosine", final_ratio=0.0
)
OUTER = OuterConfig(learning_rate=1.0, momentum=0.7)
STREAMING_OUTER = OuterConfig(learning_rate=0.7, momentum=0.8)
"""The best of several values in trials with a model of 0.2M parameters."""


def _run(
    num_steps: int, interval_steps: int, inner: InnerConfig, outer: OuterConfig = OUTER, **settings: object
) -> RunConfig:
    return RunConfig(
        name="bench",
        interval_steps=interval_steps,
        outer_steps=num_steps // interval_steps,
        inner=inner,
        outer=outer,
        **settings,  # type: ignore[arg-type]
    )


ALL_WINDOWS = replace(INNER, batch_windows=NUM_REPLICAS * BATCH_WINDOWS)
PRETRAINING = Method(
    name="pretraining",
    run=_run(PRETRAINING_STEPS, 50, replace(ALL_WINDOWS, schedule="constant")),
    num_replicas=1,
)
DATA_PARALLEL = Method(name="data parallel", run=_run(INNER_STEPS, 50, ALL_WINDOWS), num_replicas=1)
DILOCO = Method(name="DiLoCo, H 50, int8", run=_run(INNER_STEPS, 50, INNER, codec="int8"), num_replicas=NUM_REPLICAS)
STREAMING = Method(
    # a fragment's own interval is 4 times 12 steps
    name="streaming, 4 fragments, H 48, tau 2, int4",
    run=_run(INNER_STEPS, 12, INNER, STREAMING_OUTER, fragments=4, overlap_steps=2, mixing=0.0, codec="int4"),
    num_replicas=NUM_REPLICAS,
)


METHODS = {method.name: method for method in (PRETRAINING, DATA_PARALLEL, DILOCO, STREAMING)}


def _train(name: str, *, theta_N: Tensor | None = None, first_sample: int = 0) -> Curve:
    """Train in a separate process, to which a run's configuration cannot be sent."""
    return train(replace(METHODS[name], theta_N=theta_N, first_sample=first_sample))


def test_replicas_that_communicate_rarely_learn_as_much_from_the_same_tokens() -> None:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        pretrained = pool.submit(_train, PRETRAINING.name).result()
        names = [method.name for method in (DILOCO, STREAMING, DATA_PARALLEL)]
        trained = partial(_train, theta_N=pretrained.theta_N, first_sample=PRETRAINING.num_samples)
        diloco, streaming, data_parallel = curves = tuple(pool.map(trained, names))
    report = Report(f"Validation loss after {data_parallel.points[-1][0] / 1e6:.2f}M tokens")
    for curve in (data_parallel, diloco, streaming):
        report.row(curve.name, nats_a_byte=f"{curve.loss:.4f}", against_data_parallel=_against(curve, data_parallel))
        report.row(curve.name, seconds=curve.seconds)
    report.show()
    draw((pretrained, *curves), PLOT)
    aim(
        DiLoCo_within_1_percent=diloco.loss <= MOST_DILOCO * data_parallel.loss,
        streaming_within_1_5_percent=streaming.loss <= MOST_STREAMING * data_parallel.loss,
    )


def _against(curve: Curve, other: Curve) -> str:
    return f"{curve.loss / other.loss - 1:+.2%}"
