"""How more trainers than one group has places should work together: what each way costs in loss, bytes and agreement.

    .venv/bin/python -m pytest tests/bench/test_bench_groups.py -m bench -s

32 replicas of a small byte-level Llama (89,000 parameters) on the standard library's source, after equal tokens, each
way with the run's own inner optimizer, int8, outer step and default aggregator:

- one group: all 32 in one round, which is what the others are compared with;
- clusters: 4 heads aggregate what 7 followers bring, and the round is among the heads; clusters are drawn at each step;
- mixing: groups of 8 take outer steps of their own, and all replicas and their momenta are averaged at each fourth one;
- gossip: a group of 8 is drawn at each step, and nothing is ever averaged over all (NoLoCo, Kolehmainen et al. 2025,
  arXiv 2506.10911, algorithm 1, here with groups of 8 for its pairs);
- committee: 8 of 32 are drawn at each step, and the others rest (MoDeST, de Vos et al. 2023, arXiv 2302.13837). For
  the same tokens it takes four times as many steps, and as much longer; so it is measured after the same time, too.

Bytes are those that a member sends for each interval of all 32, in encoded vectors (V) of a byte a parameter: the mean,
and the most that one member sends. Replicas disagree by the root mean square of their distances from their mean,
relative to how far the mean has come. Costs a quarter of an hour of one core.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from bench.report import Report, aim
from swarm.training.allreduce.part_reduction import PartReducer
from swarm.training.allreduce.parts import ReductionScheme, leaf_values
from swarm.training.data.corpus import Corpus, load_corpus
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.run.run_tables import InnerConfig, OuterConfig
from swarm.training.state.outer_step import apply_outer_step
from swarm_compression import get_codec
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution
from torch import Tensor

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]

NUM_REPLICAS, GROUP_SIZE = 32, 8
NUM_GROUPS = NUM_REPLICAS // GROUP_SIZE
OUTER_STEPS, INTERVAL_STEPS = 24, 10
MIXING_STEPS = 4
SEEDS = (0, 1, 2)
NUM_WINDOWS = 256
STATE_VECTORS = 8
"""The size of a state's weights and momentum in fp32, in V."""
ALPHA, BETA, GAMMA = 0.5, 0.7, 0.9
"""Parameters of gossip: NoLoCo's own alpha and beta, and a gamma within its bounds for groups of 8."""
MOST_LOSS = 1.01
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
PEERS = sorted(Identity(bytes([number]) * 32).peer_id for number in range(1, NUM_REPLICAS + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Hold the `loss` in nats a byte of the state that all share at the end, or of the replicas' mean."""

    loss: float
    disagreement: float


class Bench:
    """Train the replicas of one run in turn in this process."""

    def __init__(self, seed: int, corpus: Corpus) -> None:
        self.run = RunConfig(
            name="bench",
            seed=seed,
            outer_steps=OUTER_STEPS,
            interval_steps=INTERVAL_STEPS,
            model=MODEL,
            inner=InnerConfig(batch_windows=2, learning_rate=4e-3, schedule="cosine", final_ratio=0.1),
            outer=OuterConfig(),
        )
        self._loops = [InnerLoop(self.run, build_model(self.run.model), corpus) for _ in range(NUM_REPLICAS)]
        self._codec = get_codec(self.run.codec)
        self.theta_N = initial_theta(self.run)
        self.zeros_N = torch.zeros_like(self.theta_N)
        self.draw = random.Random(seed)

    def delta(self, replica: int, theta_N: Tensor, step: int, place: int) -> Tensor:
        """Return the pseudo-gradient of one interval from `theta_N`, on the samples of the given place of 32 in the
        step."""
        loop, num_samples = self._loops[replica], self.run.samples_per_interval
        first = (step * NUM_REPLICAS + place) * num_samples
        loop.load(theta_N)
        loop.train(range(first, first + num_samples), INTERVAL_STEPS, done_steps=step * INTERVAL_STEPS)
        return theta_N - loop.flat()

    def reduced(self, deltas: Sequence[Tensor], weights: Sequence[int] = ()) -> Tensor:
        """Return the result of a group's reduction before it is encoded."""
        counts = weights or [1] * len(deltas)
        members = [
            Contribution(peer_id=peer, num_tokens=count, num_samples=count)
            for peer, count in zip(PEERS, counts, strict=False)
        ]
        scheme = ReductionScheme(codec=self._codec, aggregator=self.run.aggregator_for(len(deltas)))
        num_values = self.theta_N.numel()
        encoded = [self._codec.encode(delta_N) for delta_N in deltas]
        reducer = PartReducer(scheme, members, leaf_values(num_values), lambda _: b"")
        return reducer.combined(encoded, slice(0, num_values))

    def carried(self, x_N: Tensor) -> Tensor:
        """Return the state as the members of its group carry it."""
        return self._codec.decode(self._codec.encode(x_N), x_N.numel())

    def shuffled_groups(self) -> Iterator[list[int]]:
        order = list(range(NUM_REPLICAS))
        self.draw.shuffle(order)
        return (order[start : start + GROUP_SIZE] for start in range(0, NUM_REPLICAS, GROUP_SIZE))

    def loss(self, theta_N: Tensor) -> float:
        return self._loops[0].held_out_loss(theta_N, NUM_WINDOWS)

    def result(self, thetas: Sequence[Tensor]) -> Result:
        mean_N = torch.stack(list(thetas)).mean(0)
        spread = torch.stack([(theta_N - mean_N).square().sum() for theta_N in thetas]).mean().sqrt()
        moved = (mean_N - self.theta_N).norm()
        return Result(loss=self.loss(mean_N), disagreement=float(spread / moved))


def one_group(bench: Bench) -> Result:
    theta_N, momentum_N = bench.theta_N.clone(), bench.zeros_N.clone()
    for step in range(OUTER_STEPS):
        deltas = [bench.delta(replica, theta_N, step, replica) for replica in range(NUM_REPLICAS)]
        apply_outer_step(theta_N, momentum_N, bench.carried(bench.reduced(deltas)), bench.run.outer)
    return bench.result([theta_N])


def clusters(bench: Bench) -> Result:
    theta_N, momentum_N = bench.theta_N.clone(), bench.zeros_N.clone()
    for step in range(OUTER_STEPS):
        brought = [
            bench.reduced([bench.delta(replica, theta_N, step, replica) for replica in members])
            for members in bench.shuffled_groups()
        ]
        mean_N = bench.carried(bench.reduced(brought, [GROUP_SIZE] * len(brought)))
        apply_outer_step(theta_N, momentum_N, mean_N, bench.run.outer)
    return bench.result([theta_N])


def mixing(bench: Bench) -> Result:
    theta_N, momentum_N = bench.theta_N.clone(), bench.zeros_N.clone()
    disagreements = []
    for first in range(0, OUTER_STEPS, MIXING_STEPS):
        thetas, momenta = [], []
        for members in bench.shuffled_groups():
            own_N, own_momentum_N = theta_N.clone(), momentum_N.clone()
            for step in range(first, first + MIXING_STEPS):
                deltas = [bench.delta(replica, own_N, step, replica) for replica in members]
                apply_outer_step(own_N, own_momentum_N, bench.carried(bench.reduced(deltas)), bench.run.outer)
            thetas.append(own_N)
            momenta.append(own_momentum_N)
        disagreements.append(bench.result(thetas).disagreement)
        theta_N, momentum_N = torch.stack(thetas).mean(0), torch.stack(momenta).mean(0)
    return Result(loss=bench.loss(theta_N), disagreement=disagreements[-1])


def gossip(bench: Bench) -> Result:
    thetas = [bench.theta_N.clone() for _ in range(NUM_REPLICAS)]
    momenta = [bench.zeros_N.clone() for _ in range(NUM_REPLICAS)]
    for step in range(OUTER_STEPS):
        deltas = [bench.delta(replica, thetas[replica], step, replica) for replica in range(NUM_REPLICAS)]
        for members in bench.shuffled_groups():
            delta_N = bench.carried(bench.reduced([deltas[replica] for replica in members]))
            mean_N = torch.stack([thetas[replica] for replica in members]).mean(0)
            for replica in members:
                pull_N = GAMMA * (mean_N - thetas[replica])
                momenta[replica] = ALPHA * momenta[replica] - BETA * delta_N + pull_N
                thetas[replica] = thetas[replica] + momenta[replica]
    return bench.result(thetas)


def committee(bench: Bench, num_turns: int = NUM_GROUPS) -> Result:
    """Use `num_turns` committees for each step of the other methods."""
    theta_N, momentum_N = bench.theta_N.clone(), bench.zeros_N.clone()
    for step in range(OUTER_STEPS):
        for turn in range(num_turns):
            chosen = bench.draw.sample(range(NUM_REPLICAS), GROUP_SIZE)
            deltas = [
                bench.delta(replica, theta_N, step, turn * GROUP_SIZE + place) for place, replica in enumerate(chosen)
            ]
            apply_outer_step(theta_N, momentum_N, bench.carried(bench.reduced(deltas)), bench.run.outer)
    return bench.result([theta_N])


WAYS: dict[str, Callable[[Bench], Result]] = {
    "one group of 32": one_group,
    "clusters of 8, 4 heads": clusters,
    "groups of 8, mixing at every 4th step": mixing,
    "groups of 8, gossip": gossip,
    "committee of 8, 4 times as long": committee,
    "committee of 8, a quarter of the tokens": partial(committee, num_turns=1),
}


def _butterfly(num_members: int) -> float:
    """Return the bytes that each member sends in a butterfly: its slices to the owners, and its own part's result to
    the others."""
    return 2 * (num_members - 1) / num_members


def _bytes_sent(way: str) -> tuple[float, float]:
    """Return the mean and the most that a member sends for an interval of all replicas, in V."""
    num_followers = NUM_REPLICAS - NUM_GROUPS
    match way:
        case "one group of 32":
            return _butterfly(NUM_REPLICAS), _butterfly(NUM_REPLICAS)
        case "clusters of 8, 4 heads":
            # followers fetch the round's result from the heads
            head = _butterfly(NUM_GROUPS) + num_followers / NUM_GROUPS
            return (num_followers + NUM_GROUPS * head) / NUM_REPLICAS, head
        case "groups of 8, mixing at every 4th step":
            # weights and momenta of all replicas
            mixed = _butterfly(GROUP_SIZE) + 2 * _butterfly(NUM_REPLICAS) / MIXING_STEPS
            return mixed, mixed
        case "groups of 8, gossip":
            return 2 * _butterfly(GROUP_SIZE), 2 * _butterfly(GROUP_SIZE)
        case _:
            # replicas outside the last committee fetch the state from it
            fetched = (1 - GROUP_SIZE / NUM_REPLICAS) * STATE_VECTORS
            return _butterfly(GROUP_SIZE) + fetched, _butterfly(GROUP_SIZE) + fetched


def test_clusters_lose_less_than_one_percent_against_one_group() -> None:
    torch.set_num_threads(1)
    results: dict[str, list[Result]] = {way: [] for way in WAYS}
    seconds = dict.fromkeys(WAYS, 0.0)
    corpus = load_corpus(RunConfig(name="bench").data, seed=0)
    for seed in SEEDS:
        for way, train in WAYS.items():
            started = time.process_time()
            bench = Bench(seed, corpus)
            results[way].append(train(bench))
            seconds[way] += time.process_time() - started
            print(f"seed {seed}, {way}: {results[way][-1].loss:.4f}", flush=True)
    report = Report(f"Validation loss of 32 replicas after {OUTER_STEPS} intervals of {INTERVAL_STEPS} inner steps")
    ratios = {
        way: [one.loss / other.loss for one, other in zip(of_way, results["one group of 32"], strict=True)]
        for way, of_way in results.items()
    }
    for way, of_way in results.items():
        mean, most = _bytes_sent(way)
        report.row(
            way,
            nats_a_byte=f"{statistics.mean(each.loss for each in of_way):.4f}",
            against_one_group=f"{statistics.mean(ratios[way]) - 1:+.2%}",
            worst_seed=f"{max(ratios[way]) - 1:+.2%}",
            disagreement=f"{statistics.mean(each.disagreement for each in of_way):.1%}",
            mean_sent_V=mean,
            most_sent_V=most,
            cpu_s=seconds[way],
        )
    report.show()
    aim(clusters_within_1_percent=max(ratios["clusters of 8, 4 heads"]) <= MOST_LOSS)
