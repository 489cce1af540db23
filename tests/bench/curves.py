"""Training curves of one run's replicas, in one process, in turn: the arithmetic of rounds without their messages.

Made of the trainers' own pieces: leases' order of samples, inner loops, codecs both ways, and the outer step.

Shapes: N values of the model, F of a fragment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from swarm.training.data.corpus import load_corpus
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.run.layout import Layout, fragment_of
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.state.outer_step import apply_outer_step
from swarm_compression import get_codec
from torch import Tensor

EVERY_STEPS = 100
"""Inner steps between two points of a curve."""
NUM_WINDOWS = 512
"""The number of validation batches, equal for all points: 65k tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`run` is trained by `num_replicas`, from `theta_N` and sample `first_sample` on; None: from the run's beginning.

    One replica trains without outer steps: data parallel, as `run` has then the windows of all.
    """

    name: str
    run: RunConfig
    num_replicas: int
    theta_N: Tensor | None = None
    first_sample: int = 0

    @property
    def num_samples(self) -> int:
        return self.num_replicas * self.run.outer_steps * self.run.samples_per_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Hold the points of a curve: tokens of all replicas, and the validation loss in nats a byte."""

    name: str
    points: tuple[tuple[int, float], ...]
    seconds: float
    theta_N: Tensor

    @property
    def loss(self) -> float:
        return self.points[-1][1]


class Replicas:
    """Train the replicas of `method` from the run's initial weights."""

    def __init__(self, method: Method) -> None:
        run = self._run = method.run
        self._first_sample = method.first_sample
        self._corpus = load_corpus(run.data, seed=run.seed)
        self._loops = [InnerLoop(run, build_model(run.model), self._corpus) for _ in range(method.num_replicas)]
        self._layout = Layout.of(build_model(run.model), run.fragments)
        self._codec = get_codec(run.codec)
        self.theta_N = initial_theta(run) if method.theta_N is None else self._arranged(method)
        self._momentum_N = torch.zeros_like(self.theta_N)
        for loop in self._loops:
            loop.load(self.theta_N)

    def interval(self, step: int) -> None:
        """From inner step to inner step of outer step `step`, from 1 on, as `trainer` has them: a round's result is
        taken in `overlap_steps` later."""
        run = self._run
        deltas = []
        where = self._layout.slice(fragment_of(step, run.fragments))
        for index, loop in enumerate(self._loops):
            first = self._first_sample + ((step - 1) * len(self._loops) + index) * run.samples_per_interval
            samples = range(first, first + run.samples_per_interval)
            self._train(loop, samples, step, 0, run.overlap_steps)
            if step > 1 and len(self._loops) > 1:
                before = self._layout.slice(fragment_of(step - 1, run.fragments))
                loop.take_in(before, self.theta_N[before], run.mixing)
            self._train(loop, samples, step, run.overlap_steps, run.interval_steps)
            deltas.append(self.theta_N[where] - loop.flat(where))
        if len(self._loops) > 1:
            apply_outer_step(self.theta_N[where], self._momentum_N[where], self._mean(deltas), run.outer)
        else:
            self.theta_N = self._loops[0].flat()

    def loss(self, num_windows: int) -> float:
        return self._loops[0].held_out_loss(self.theta_N, num_windows)

    def _arranged(self, method: Method) -> Tensor:
        """Return weights in the order of one fragment, arranged for the method's fragments."""
        assert method.theta_N is not None
        whole = Layout.of(build_model(method.run.model))
        return self._layout.join(whole.unflatten(method.theta_N))

    def _train(self, loop: InnerLoop, samples: Sequence[int], step: int, start: int, stop: int) -> None:
        size = self._run.inner.batch_windows
        done_steps = (step - 1) * self._run.interval_steps + start
        loop.train(samples[start * size : stop * size], stop - start, done_steps=done_steps)

    def _mean(self, deltas: list[Tensor]) -> Tensor:
        """Return the mean [F] of the deltas, with the codec applied to each contribution and to the result."""
        num_values = deltas[0].numel()
        mean_F = torch.zeros(num_values)
        for delta_F in deltas:
            self._codec.accumulate(self._codec.encode(delta_F), 1 / len(deltas), mean_F)
        return self._codec.decode(self._codec.encode(mean_F), num_values)


def train(method: Method) -> Curve:
    """Train the whole run on one thread and return its curve."""
    torch.set_num_threads(1)
    started, run, replicas = time.perf_counter(), method.run, Replicas(method)
    tokens_a_step = method.num_replicas * run.inner.batch_windows * run.data.window_tokens
    before = method.first_sample * run.data.window_tokens
    points = [(before, replicas.loss(NUM_WINDOWS))]
    for step in range(1, run.outer_steps + 1):
        replicas.interval(step)
        num_steps = step * run.interval_steps
        if num_steps % EVERY_STEPS < run.interval_steps or step == run.outer_steps:
            points.append((before + num_steps * tokens_a_step, replicas.loss(NUM_WINDOWS)))
    seconds = time.perf_counter() - started
    return Curve(name=method.name, points=tuple(points), seconds=seconds, theta_N=replicas.theta_N)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves as SVG."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens, all replicas [million]", ylabel="validation loss [nats a byte]")
    for curve in curves:
        tokens, losses = zip(*curve.points, strict=True)
        axes.plot([each / 1e6 for each in tokens], losses, marker=".", label=f"{curve.name}: {curve.loss:.4f}")
    axes.set_ylim(top=1.5 * curves[0].loss)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
