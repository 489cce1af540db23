"""The default run without a network: four replicas in one process, with the real codec, leases and outer step.

    .venv/bin/python -m pytest tests/bench/test_bench_default_run.py -m bench -s

Shows what the defaults of the run config promise: the validation loss by outer step, and training tokens/s of one core.
"""

from __future__ import annotations

import pytest
import torch
from swarm.training.data.corpus import load_bytes
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.state.lease import Cursor, SampleIds, advance, leases
from swarm.training.state.outer_step import apply_outer_step
from swarm.training.state.replica_state import ReplicaState
from swarm_compression import get_codec

MEMBERS = ("a", "b", "c", "d")
NUM_OUTER_STEPS = 10


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_default_run_ten_outer_steps_halve_the_loss() -> None:
    torch.set_num_threads(1)
    run = RunConfig(name="bench")
    corpus = load_bytes(run.data, seed=run.seed)
    loops = {member: InnerLoop(run, build_model(run.model), corpus) for member in MEMBERS}
    codec = get_codec(run.codec)
    state = ReplicaState.initial(initial_theta(run))
    num_values, cursor = state.theta_N.numel(), Cursor()
    first = loops["a"].held_out_loss(state.theta_N, 96)
    print(f"\nouter step  loss   tokens/s a core\n{0:10}  {first:.3f}")
    for step in range(1, NUM_OUTER_STEPS + 1):
        issued = leases(cursor, MEMBERS, run.samples_per_interval)
        mean_N, results = torch.zeros(num_values), []
        for member, loop in loops.items():
            loop.load(state.theta_N)
            results.append(loop.train(SampleIds(issued[member]), run.interval_steps))
            mean_N += codec.decode(codec.encode(state.theta_N - loop.flat()), num_values) / len(MEMBERS)
        apply_outer_step(state.theta_N, state.momentum_N, codec.decode(codec.encode(mean_N), num_values), run.outer)
        used = {member: result.num_samples for member, result in zip(MEMBERS, results, strict=True)}
        cursor = advance(cursor, MEMBERS, run.samples_per_interval, used)
        loss = loops["a"].held_out_loss(state.theta_N, 96)
        tokens_per_s = sum(each.num_tokens for each in results) / sum(each.seconds for each in results)
        print(f"{step:10}  {loss:.3f}  {tokens_per_s:8.0f}")
    assert cursor.num_committed == NUM_OUTER_STEPS * len(MEMBERS) * run.samples_per_interval
    assert first > 5.4
    assert loss < 2.6
