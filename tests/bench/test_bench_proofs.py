"""What proofs cost a member of a reduction in CPU seconds: to commit, to hash what it checks, and to recompute a leaf.

make bench                                             # or alone:
.venv/bin/python -m pytest tests/bench/test_bench_proofs.py -m bench -s
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from bench.report import Report
from swarm.training.allreduce.committed_slices import committed_tree
from swarm.training.allreduce.leaf_checks import hashed_part, reduced_leaf
from swarm.training.allreduce.parts import ReductionScheme, leaf_at, part_frames, part_values
from swarm.training.run.run_config import RunConfig
from swarm.trust.standard_aggregators import DEFAULT_AGGREGATOR
from swarm_compression import get_codec, warm_up
from swarm_protocol.identity import Identity
from swarm_protocol.reduction_messages import AuditedSlice
from swarm_protocol.training_messages import Contribution, Group

pytestmark = pytest.mark.bench

NUM_MEMBERS = 5
NUM_VALUES = 10_000_000
MOST_CPU_S = 0.25
"""A twentieth of an outer step of 5 s."""


def median_cpu_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        since = time.process_time()
        work()
        times.append(time.process_time() - since)
    return statistics.median(times)


@pytest.mark.parametrize("aggregator", ["mean", DEFAULT_AGGREGATOR])
def test_proofs_take_less_than_a_twentieth_of_a_short_step(aggregator: str) -> None:
    torch.set_num_threads(1)
    warm_up()
    codec, delta_N = get_codec("int8"), torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(0))
    peers = sorted(Identity(bytes([number]) * 32).peer_id for number in range(NUM_MEMBERS))
    group = Group(
        run="bench",
        step=1,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=peer, num_tokens=4, num_samples=1) for peer in peers),
        part_values=part_values(NUM_VALUES, (1.0,) * NUM_MEMBERS),
        reduce_s=60.0,
        vote_s=60.0,
    )
    scheme = ReductionScheme(
        codec=codec, aggregator=RunConfig(name="bench", aggregator=aggregator).aggregator_for(NUM_MEMBERS)
    )
    part = b"".join(codec.encode(delta_N[frame]) for frame in part_frames(group, 0))
    leaf = AuditedSlice(data=codec.encode(delta_N[leaf_at(NUM_VALUES, 0)]))
    commit_s = median_cpu_s(lambda: committed_tree(lambda frame: codec.encode(delta_N[frame]), codec, NUM_VALUES))
    # slices of the own part from all members, and the results of all parts: both are as large as the vector
    hash_s = 2 * NUM_MEMBERS * median_cpu_s(lambda: hashed_part(codec, group, 0, part))
    leaf_s = median_cpu_s(lambda: reduced_leaf(group, scheme, 0, [leaf] * NUM_MEMBERS))
    report = Report(f"CPU seconds that proofs take a member of {NUM_MEMBERS}, {NUM_VALUES} values in int8")
    report.row(aggregator, commit=commit_s, hash=hash_s, leaf=leaf_s)
    report.show()
    assert commit_s + hash_s + (NUM_MEMBERS - 1) * leaf_s < MOST_CPU_S
