"""What share of their time members compute, over home links: DiLoCo, streaming DiLoCo, and data parallel side by side.

    .venv/bin/python -m pytest tests/bench/test_bench_utilization.py -m bench -s

In virtual time on a simulated internet: trainers, round machine, reduction and codecs are the real ones, on a vector of
10M values; only the inner steps are made up. Each takes 0.1 s: 32k tokens at 20 TFLOP/s, 6 operations a parameter and
token. Bytes and operations both grow with the model, so a larger one at equal tokens a step has the same ratio, and
less of the latency. Compute for rounds (encoding, hashing, the outer step) costs nothing here.

Utilization counts only inner steps that were committed: their seconds over all members' seconds, from the first outer
step to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from bench.report import Report
from support.training_swarm import WINDOW_TOKENS, Swarm, SyntheticInner, config
from support.wan_proxy import MBIT_BYTES
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.testing import virtual_time
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.trainer_events import OuterStep
from swarm_protocol.identity import Identity

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

NUM_MEMBERS = 4
NUM_VALUES = 10_000_000
STEP_S = 0.1
LATENCY_S = 0.05
MBITS = (20, 100)
BATCH_WINDOWS = 2  # as in the synthetic inner loop

STREAMING = "streaming, 4 fragments, H 52, tau 12, int4"
LEAST_STREAMING = 0.95
"""The least utilization of Streaming DiLoCo at 100 Mbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Describe a method. `num_steps` are outer steps, enough for the first one, in which the group forms, to matter
    little."""

    name: str
    num_steps: int
    settings: dict[str, Any] = field(default_factory=dict)


METHODS = (
    Method(name="data parallel, bf16", num_steps=4, settings={"interval_steps": 1, "codec": "bf16"}),
    Method(name="DiLoCo, H 50, int8", num_steps=4, settings={"interval_steps": 50, "codec": "int8"}),
    Method(
        # a fragment's own interval is 4 times 13 steps
        name=STREAMING,
        num_steps=13,
        settings={"interval_steps": 13, "fragments": 4, "overlap_steps": 12, "mixing": 0.5, "codec": "int4"},
    ),
)


class PassingInner(SyntheticInner):
    """Compute the first step of a stretch, and let the others only take their time."""

    def clock(self) -> float:
        return self._passed_s

    def __post_init__(self) -> None:
        super().__post_init__()
        self._passed_s = 0.0

    def train(
        self,
        sample_ids: Sequence[int],
        num_steps: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        done_steps: int = 0,
    ) -> IntervalResult:
        made = super().train(sample_ids, min(1, num_steps), stop, done_steps=done_steps)
        num_steps *= made.num_steps
        virtual_time.charge(STEP_S * num_steps)
        self._passed_s += STEP_S * num_steps
        num_samples = num_steps * BATCH_WINDOWS
        return replace(made, num_steps=num_steps, num_samples=num_samples, num_tokens=num_samples * WINDOW_TOKENS)


class HomeLines(MemoryInternet):
    """Give each node a line of `mbit` Mbit/s up and as much down, which all its links share."""

    def __init__(self, mbit: float) -> None:
        super().__init__(default_link=LinkModel(latency_s=LATENCY_S))
        self._rate = mbit * MBIT_BYTES

    def network(self, identity: Identity | None = None, network_id: str = "test", **access: float) -> MemoryNetwork:
        return super().network(
            identity, network_id, **{"up_bytes_per_s": self._rate, "down_bytes_per_s": self._rate, **access}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold the figures of a run. `megabytes` is the average that a member sent for one outer step."""

    utilization: float
    step_s: float
    megabytes: float


def measure(method: Method, mbit: float) -> Outcome:
    run = config(outer_steps=method.num_steps, min_group=NUM_MEMBERS, max_group=NUM_MEMBERS, **method.settings)

    async def main() -> Outcome:
        async with Swarm(run) as swarm:
            swarm.internet = HomeLines(mbit)
            members = [
                await swarm.join(f"m{index}", inner=PassingInner(num_values=NUM_VALUES)) for index in range(NUM_MEMBERS)
            ]
            await swarm.finish(timeout_s=86400)
            return _outcome(members[0].of(OuterStep))

    return virtual_time.run(main(), real_timeout_s=900)


def _outcome(steps: list[OuterStep]) -> Outcome:
    _, *others = steps
    wall_s = sum(event.seconds for event in others)
    num_samples = sum(event.num_tokens for event in others) / WINDOW_TOKENS
    compute_s = num_samples / BATCH_WINDOWS * STEP_S / NUM_MEMBERS
    return Outcome(
        utilization=compute_s / wall_s,
        step_s=wall_s / len(others),
        megabytes=sum(event.bytes_sent for event in others) / len(others) / 1e6,
    )


def test_streaming_members_compute_nearly_all_the_time() -> None:
    report = Report(
        f"Compute over wall time: {NUM_MEMBERS} members, {NUM_VALUES / 1e6:.0f}M parameters, {STEP_S} s an inner step,"
        f" {LATENCY_S * 1000:.0f} ms each way"
    )
    shares = {}
    for method in METHODS:
        for mbit in MBITS:
            outcome = measure(method, mbit)
            shares[method.name, mbit] = outcome.utilization
            report.row(method.name, **{f"at_{mbit}_Mbit_per_s": f"{outcome.utilization:.1%}"})
            report.row(method.name, **{f"outer_step_s_at_{mbit}": outcome.step_s, "MB_sent_a_step": outcome.megabytes})
    report.show()
    assert shares[STREAMING, 100] >= LEAST_STREAMING
