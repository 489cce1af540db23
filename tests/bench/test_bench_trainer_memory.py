"""The memory of a trainer with 22 million parameters, beside what `swarm-node run show` says that it takes.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_trainer_memory.py -m bench -s

Two real nodes train three outer steps and write their checkpoints. `peak_MiB` is the most that a node's process and its
living children, the libp2p daemon among them, had resident at one time.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from bench.process_memory import TreePeaks
from bench.report import Report
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_cost import PROGRAM_BYTES, cost_of
from swarm.training.run.run_file import write_run
from swarm.training.run.run_tables import DataConfig
from swarm_node.demo.nodes import DemoState, Fleet
from swarm_protocol.identity import Identity

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MIB = 2**20
NUM_STEPS = 3
MOST_MIB = 1260
"""The most memory, with the activations of 4 windows of 128 tokens."""
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}


def test_trainer_takes_what_run_show_says(tmp_path: Path) -> None:
    config = RunConfig(
        name="memory", outer_steps=NUM_STEPS, interval_steps=4, model=MODEL, data=DataConfig(window_tokens=128)
    )
    run_path, cost = tmp_path / "run.toml", cost_of(config)
    author = Identity(b"a" * 32)
    write_run(run_path, config, author)
    report = Report(f"trainers of {cost.num_parameters / 1e6:.1f}M parameters, {NUM_STEPS} outer steps")

    async def main() -> list[int]:
        state = DemoState(num_nodes=2)
        async with Fleet(tmp_path, state, lambda _name, _event: None) as fleet:
            await fleet.spawn("seed", "seed")
            await fleet.until(lambda: bool(state.node("seed").addrs), within_s=60, what="starting the seed")
            names = ("node-1", "node-2")
            for name in names:
                await fleet.spawn(name, "join", "--run", str(run_path), "--peers", state.node("seed").addrs[0])
            with TreePeaks(fleet.processes[name].process.pid for name in names) as tree:
                done = lambda: all(state.node(name).outer_step >= NUM_STEPS for name in names)  # noqa: E731
                await fleet.until(done, within_s=600, what="training")
            return [sum(each) for each in tree.peaks.values()]

    peaks = asyncio.run(main())
    for index, peak in enumerate(peaks):
        report.row(
            f"trainer {index + 1}",
            peak_MiB=peak / MIB,
            said_MiB=cost.memory_bytes / MIB,
            bytes_a_parameter=(peak - PROGRAM_BYTES) / cost.num_parameters,
        )
    report.show()
    assert max(peaks) <= MOST_MIB * MIB
    assert all(0.9 * cost.memory_bytes <= peak <= 1.1 * cost.memory_bytes for peak in peaks)
