"""A run of a small model with one liar among its members, in one process: rounds without their messages.

Made of the trainers' own pieces, as `curves` is: inner loops, the codec both ways, parts, aggregators, and the outer
step. The liar knows what all others contribute before it answers, which no member of a real round does.

Shapes: M members, H honest ones, N values of the model, F of a leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from support.aggregated import aggregate
from swarm.training.allreduce.parts import leaf_values
from swarm.training.data.corpus import Corpus, load_corpus
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.run.run_tables import DataConfig, InnerConfig
from swarm.training.state.outer_step import apply_outer_step
from swarm.trust.aggregator import AggregationReport, Aggregator
from swarm.trust.mixing import NO_MIXING, get_mixing
from swarm.trust.standard_aggregators import get_aggregator
from swarm_compression import get_codec
from torch import Tensor

NUM_WINDOWS = 128
"""The number of validation batches."""

RUN = RunConfig(
    name="liars",
    outer_steps=10,
    interval_steps=8,
    model={
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 256,
    },
    data=DataConfig(window_tokens=32),
    inner=InnerConfig(batch_windows=4, learning_rate=1e-2, warmup_steps=8),
)
"""21k parameters: a step takes some milliseconds, and the validation loss falls from 5.5 to 2.6 nats a byte."""

Lie = Callable[[Tensor, Tensor], Tensor]
"""Return the liar's contribution [N] from its own honest contribution [N] and all honest ones [H, N]."""


def _noise_like(x_N: Tensor) -> Tensor:
    """Return the same random direction in each round, as long as `x_N`."""
    direction_N = torch.randn(x_N.numel(), generator=torch.Generator().manual_seed(1))
    return direction_N * (x_N.norm() / direction_N.norm())


LIES: Mapping[str, Lie] = {
    "none": lambda own_N, _: own_N,
    "sign flip": lambda own_N, _: -own_N,
    "scaled": lambda own_N, _: -30 * own_N,
    "large norm": lambda own_N, _: 1000 * _noise_like(own_N),
    "small bias": lambda own_N, _: _noise_like(own_N),
    "inner product": lambda _, honest_HN: -0.5 * honest_HN.mean(0),
    "a little is enough": lambda _, honest_HN: honest_HN.mean(0) - 1.5 * honest_HN.std(0),
}
"""A little is enough: Baruch et al. 2019, arXiv 1902.06156. Inner product: Xie et al. 2019, arXiv 1903.03936."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    aggregator: str
    lie: str
    num_members: int
    mixing: str = NO_MIXING


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """`loss`: of validation, in nats a byte, after the last outer step. `least_kept`: how much of an honest
    contribution's pull was left, on the mean of a step's leaves, in the worst step; 1 where each coordinate has its
    own answer."""

    loss: float
    least_kept: float


class LyingRun:
    """Run one trial in which the last member lies."""

    def __init__(self, trial: Trial, corpus: Corpus) -> None:
        self._lie = LIES[trial.lie]
        mixing = get_mixing(trial.mixing, liar_share=RUN.liar_share, reach=RUN.neighbour_reach)
        self._aggregator: Aggregator = get_aggregator(trial.aggregator, {}, mixing)
        self._loops = [InnerLoop(RUN, build_model(RUN.model), corpus) for _ in range(trial.num_members)]
        self._theta_N = initial_theta(RUN)
        self._momentum_N = torch.zeros_like(self._theta_N)
        self._codec = get_codec(RUN.codec)
        self._kept = [1.0]

    def train(self) -> Ending:
        for step in range(RUN.outer_steps):
            delta_MN = torch.stack([self._delta(step, index) for index in range(len(self._loops))])
            delta_MN[-1] = self._lie(delta_MN[-1], delta_MN[:-1])
            apply_outer_step(self._theta_N, self._momentum_N, self._reduced(delta_MN), RUN.outer)
        loss = self._loops[0].held_out_loss(self._theta_N, NUM_WINDOWS)
        return Ending(loss=loss, least_kept=min(self._kept))

    def _delta(self, step: int, index: int) -> Tensor:
        loop, size = self._loops[index], RUN.samples_per_interval
        first = (step * len(self._loops) + index) * size
        loop.load(self._theta_N)
        loop.train(range(first, first + size), RUN.interval_steps, done_steps=step * RUN.interval_steps)
        return self._theta_N - loop.flat()

    def _reduced(self, delta_MN: Tensor) -> Tensor:
        """Return the aggregate [N] of each leaf, after the codec."""
        num_values = delta_MN.shape[1]
        kept_M, leaves = torch.zeros(len(delta_MN)), []
        for delta_MF in delta_MN.split(leaf_values(num_values), dim=1):
            result_F, report = self._reduced_leaf(delta_MF)
            kept_M += torch.tensor(report.kept or [1.0] * len(delta_MN)) * (delta_MF.shape[1] / num_values)
            leaves.append(result_F)
        self._kept += kept_M[:-1].tolist()
        return torch.cat(leaves)

    def _reduced_leaf(self, delta_MF: Tensor) -> tuple[Tensor, AggregationReport]:
        rows = [self._over_the_wire(delta_F).numpy() for delta_F in delta_MF]
        result_F, report = aggregate(self._aggregator, lambda: [rows], (RUN.samples_per_interval,) * len(rows))
        return self._over_the_wire(torch.from_numpy(result_F)), report

    def _over_the_wire(self, x_F: Tensor) -> Tensor:
        return self._codec.decode(self._codec.encode(x_F.contiguous()), x_F.numel())


def ending(trial: Trial) -> Ending:
    """Run the trial on one thread and return its end."""
    torch.set_num_threads(1)
    return LyingRun(trial, _corpus()).train()


@functools.cache
def _corpus() -> Corpus:
    return load_corpus(RUN.data, seed=RUN.seed)
