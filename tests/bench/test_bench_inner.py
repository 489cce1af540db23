"""What each local option does to one replica's speed: the default model, the same samples, side by side.

    .venv/bin/python -m pytest tests/bench/test_bench_inner.py -m bench -s

The first steps of each are not counted: a compiler may be at work. Which options pay depends on the machine; that they
compute the same does not, and is asserted.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from swarm.training.data.corpus import load_bytes
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.one_device import LocalOptions
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.run.run_tables import InnerConfig

ADAMW = InnerConfig(batch_windows=8)
NUM_STEPS = 10
CASES = {
    "plain": (ADAMW, LocalOptions()),
    "muon": (replace(ADAMW, optimizer="muon"), LocalOptions()),
    "2 windows at a time": (ADAMW, LocalOptions(micro_batch_windows=2)),
    "autocast": (ADAMW, LocalOptions(autocast=True)),
    "activation checkpointing": (ADAMW, LocalOptions(activation_checkpointing=True)),
    "compile": (ADAMW, LocalOptions(compile=True)),
    "two processes": (ADAMW, LocalOptions(devices=("cpu", "cpu"))),
}


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_local_options_side_by_side() -> None:
    torch.set_num_threads(2)
    print(f"\n{'':26} tokens/s  of plain  loss     ready after s")
    plain_loss, plain_speed = 0.0, 0.0
    for name, (inner, local) in CASES.items():
        loss, speed, ready_s = _measure(RunConfig(name="bench", inner=inner), local)
        plain_loss, plain_speed = plain_loss or loss, plain_speed or speed
        print(f"{name:26} {speed:8.0f}  {speed / plain_speed:8.2f}  {loss:.4f}  {ready_s:6.1f}", flush=True)
        if name != "muon":
            assert loss == pytest.approx(plain_loss, rel=0.01)


def _measure(run: RunConfig, local: LocalOptions) -> tuple[float, float, float]:
    """Return the mean loss of the first steps, the tokens per second of the median step after them, and the time to the
    end of the first step."""
    started = time.perf_counter()
    loop = InnerLoop(run, build_model(run.model), load_bytes(run.data, seed=run.seed), local)
    try:
        loop.load(initial_theta(run))
        size = run.inner.batch_windows
        first = loop.train(range(3 * size), 3)
        ready_s = time.perf_counter() - started
        steps = [loop.train(range(at * size, (at + 1) * size), 1) for at in range(3, 3 + NUM_STEPS)]
    finally:
        loop.close()
    return first.mean_loss, sorted(each.tokens_per_s for each in steps)[NUM_STEPS // 2], ready_s
