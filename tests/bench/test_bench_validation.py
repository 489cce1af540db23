"""What validation of intervals costs, how far honest devices are from each other, and how far lies are.

    .venv/bin/python -m pytest tests/bench/test_bench_validation.py -m bench -s

The default model on its default data, three members, int8; distances are those of `wrong_interval.likeness`, on the
leaves that a validator is shown. "other data" is another member's contribution, "half other" has half of its samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from bench.report import Report
from swarm.training.allreduce.parts import leaf_at, part_leaves, part_values
from swarm.training.data.corpus import Corpus, load_bytes
from swarm.training.evidence.wrong_interval import draw_leaves, likeness
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.one_device import LocalOptions
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.run.run_tables import InnerConfig
from swarm.training.state.lease import Cursor, SampleIds, advance, leases
from swarm.training.state.outer_step import apply_outer_step
from swarm.training.state.replica_state import ReplicaState
from swarm_compression import get_codec
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.identity import Identity
from swarm_protocol.reduction_messages import AuditedSlice
from swarm_protocol.training_messages import Contribution, Group
from torch import Tensor

MEMBERS = tuple(sorted(Identity(bytes([number]) * 32).peer_id for number in (1, 2, 3)))
CODEC = get_codec("int8")
LOOKED_AT = (1, 2, 6)
FEW_STEPS = 5


def run_with(*, fresh: bool, **changes: object) -> RunConfig:
    return RunConfig(name="bench", inner=InnerConfig(fresh_moments=fresh, **changes))  # type: ignore[arg-type]


class Flipped:
    """Change labels, by windows of other bytes in the places of a corpus's windows."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.window_tokens = corpus.window_tokens

    def batch(self, samples: Sequence[int]) -> Tensor:
        x_BT = self._corpus.batch(samples)
        return torch.where(x_BT > 0, 255 - x_BT, x_BT)


@dataclass
class Trained:
    """Train outer steps of a run in one process. `deltas` are the members' last pseudo-gradients."""

    run: RunConfig
    corpus: Corpus

    def __post_init__(self) -> None:
        self.loop = self.loop_of()
        self.state = ReplicaState.initial(initial_theta(self.run))
        self.cursor = Cursor()
        self.loops = dict.fromkeys(MEMBERS, self.loop)
        if not self.run.inner.fresh_moments:
            self.loops = {member: self.loop_of() for member in MEMBERS}

    def loop_of(self, local: LocalOptions | None = None, corpus: object = None) -> InnerLoop:
        model = build_model(self.run.model)
        return InnerLoop(self.run, model, corpus or self.corpus, local or LocalOptions())  # type: ignore[arg-type]

    def leases(self) -> dict[str, SampleIds]:
        issued = leases(self.cursor, MEMBERS, self.run.samples_per_interval)
        return {member: SampleIds(lease) for member, lease in issued.items()}

    def delta(self, loop: InnerLoop, samples: Sequence[int], step: int) -> Tensor:
        loop.load(self.state.theta_N)
        loop.train(samples, self.run.interval_steps, done_steps=(step - 1) * self.run.interval_steps)
        return self.state.theta_N - loop.flat()

    def take(self, step: int) -> dict[str, Tensor]:
        """Return the members' pseudo-gradients of an outer step, before it is applied."""
        return {member: self.delta(self.loops[member], ids, step) for member, ids in self.leases().items()}

    def apply(self, deltas: dict[str, Tensor]) -> None:
        size = self.state.theta_N.numel()
        mean_N = sum((CODEC.decode(CODEC.encode(each), size) for each in deltas.values()), torch.zeros(size))
        sent_N = CODEC.decode(CODEC.encode(mean_N / len(deltas)), size)
        apply_outer_step(self.state.theta_N, self.state.momentum_N, sent_N, self.run.outer)
        samples = self.run.samples_per_interval
        self.cursor = advance(self.cursor, MEMBERS, samples, dict.fromkeys(MEMBERS, samples))


def group_of(num_values: int) -> Group:
    return Group(
        run="bench",
        step=1,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=member, num_tokens=1, num_samples=1) for member in MEMBERS),
        part_values=part_values(num_values, (1.0,) * len(MEMBERS)),
        reduce_s=1.0,
        vote_s=1.0,
    )


def distances(claimed_N: Tensor, mine_N: Tensor) -> Iterator[float]:
    """Yield the distance that each of a few validators would find."""
    group = group_of(claimed_N.numel())
    for number in range(8):
        outcome = Outcome(origin_digest=bytes(32), part_digests=(bytes([number]) * 32,) * 3, state_digest=bytes(32))
        chosen = draw_leaves(group, outcome, MEMBERS[0], MEMBERS[1 + number % 2])
        slices = [AuditedSlice(data=CODEC.encode(claimed_N[leaf_at(group.num_values, leaf)])) for leaf in chosen]
        yield likeness(group, CODEC, chosen, slices, mine_N, 0.5).distance


def noise_like(delta_N: Tensor) -> Tensor:
    drawn_N = torch.randn(delta_N.shape, generator=torch.Generator().manual_seed(1))
    return drawn_N * delta_N.norm() / drawn_N.norm()


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_honest_devices_are_far_within_the_tolerance_and_lies_outside() -> None:
    torch.set_num_threads(1)
    run = run_with(fresh=True)
    trained = Trained(run, load_bytes(run.data, seed=run.seed))
    devices = {
        "micro batches of 1": trained.loop_of(LocalOptions(micro_batch_windows=1)),
        "bfloat16": trained.loop_of(LocalOptions(autocast=True)),
        "bfloat16, micro batches of 2": trained.loop_of(LocalOptions(autocast=True, micro_batch_windows=2)),
    }
    flipped, stale_N = trained.loop_of(corpus=Flipped(trained.corpus)), torch.zeros(0)
    honest, lies = dict[str, list[float]](), dict[str, list[float]]()
    for step in range(1, max(LOOKED_AT) + 1):
        deltas = trained.take(step)
        if step in LOOKED_AT:
            ids, mine_N, size = trained.leases()[MEMBERS[0]], deltas[MEMBERS[0]], run.inner.batch_windows
            found = {name: trained.delta(loop, ids, step) for name, loop in devices.items()}
            for threads in (2, 3):
                torch.set_num_threads(threads)
                found[f"{threads} threads"] = trained.delta(trained.loop, ids, step)
            torch.set_num_threads(1)
            turned = [index for at in range(0, len(ids), size) for index in reversed(ids[at : at + size])]
            found["windows of a step in another order"] = trained.delta(trained.loop, turned, step)
            wrong: dict[str, Tensor | Callable[[], Tensor]] = {
                "turned round": -mine_N,
                "ten times as far": 10 * mine_N,
                "nothing": torch.zeros_like(mine_N),
                "noise": noise_like(mine_N),
                "other data": deltas[MEMBERS[1]],
                "labels flipped": trained.delta(flipped, ids, step),
                "half of the steps": trained.delta(trained.loop, ids[: len(ids) // 2], step),
            }
            if len(stale_N):
                wrong["the step before"] = stale_N
            for into, each in ((honest, found), (lies, wrong)):
                for name, claimed_N in each.items():
                    into.setdefault(name, []).extend(distances(claimed_N, mine_N))  # type: ignore[arg-type]
        stale_N = deltas[MEMBERS[0]]
        trained.apply(deltas)
    report = Report("distance of a contribution from its interval, computed once more")
    for kind, some in (("honest", honest), ("lie", lies)):
        for name, each in some.items():
            report.row(f"{kind}: {name}", smallest=min(each), largest=max(each))
    report.show()
    tolerance = run.validation_tolerance
    assert max(max(each) for each in honest.values()) < 0.7 * tolerance
    assert min(min(each) for name, each in lies.items() if name != "half of the steps") > 1.2 * tolerance


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_fresh_moments_cost_little_loss() -> None:
    torch.set_num_threads(1)
    corpus = load_bytes(run_with(fresh=False).data, seed=0)
    report = Report(f"validation loss after {FEW_STEPS} outer steps of three members")
    losses = dict[tuple[str, bool], float]()
    for optimizer in ("adamw", "muon"):
        for fresh in (False, True):
            run = run_with(fresh=fresh, optimizer=optimizer)
            trained = Trained(run, corpus)
            for step in range(1, FEW_STEPS + 1):
                trained.apply(trained.take(step))
            losses[optimizer, fresh] = trained.loop.held_out_loss(trained.state.theta_N, 96)
            report.row(optimizer, **{"fresh_moments" if fresh else "kept_moments": losses[optimizer, fresh]})
    report.show()
    for optimizer in ("adamw", "muon"):
        assert losses[optimizer, True] < 1.05 * losses[optimizer, False]


@pytest.mark.bench
def test_validation_costs_its_rate_of_the_intervals_and_no_bytes() -> None:
    torch.set_num_threads(1)
    run = replace(run_with(fresh=True), validation_rate=0.05)
    trained = Trained(run, load_bytes(run.data, seed=run.seed))
    ids, size = trained.leases()[MEMBERS[0]], trained.state.theta_N.numel()
    started = time.perf_counter()
    delta_N = trained.delta(trained.loop, ids, 1)
    interval_s = time.perf_counter() - started
    group = group_of(size)
    outcome = Outcome(origin_digest=bytes(32), part_digests=(bytes(32),) * 3, state_digest=bytes(32))
    chosen = draw_leaves(group, outcome, MEMBERS[0], MEMBERS[1])
    slices = [AuditedSlice(data=CODEC.encode(delta_N[leaf_at(size, leaf)])) for leaf in chosen]
    started = time.perf_counter()
    assert likeness(group, CODEC, chosen, slices, delta_N, 0.5).tier == "exact"
    compare_s = time.perf_counter() - started
    # the validator sits out one interval for each one that it validates, and is shown the slices of its own part
    share = run.validation_rate * (interval_s + compare_s) / interval_s
    evidence_bytes = sum(len(each.data) + 320 for each in slices)
    Report("validation at a rate of 5 %").row(
        "a member",
        interval_s=interval_s,
        comparison_ms=1000 * compare_s,
        share_of_intervals=share,
        bytes_sent=0,
        accusation_bytes=evidence_bytes,
        accusation_share_of_vector=evidence_bytes / CODEC.encoded_bytes(size),
    ).show()
    assert share < 0.0505
    assert len(chosen) == min(16, len(part_leaves(group, 1)))
