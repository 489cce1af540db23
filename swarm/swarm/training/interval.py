"""A member's inner steps between two outer steps: on its lease, off the event loop, until told to stop.

Owns the one thread that trains. What an interval contributes is kept by the round's driver until its step is decided.
Shapes: N values of the flat parameter vector.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from swarm_compression import warm_up
from swarm_protocol import limits
from swarm_protocol.errors import RoundError
from torch import Tensor

from swarm.training.data import ByteCorpus
from swarm.training.inner import InnerLoop, IntervalResult
from swarm.training.model import build_model, initial_theta
from swarm.training.run_config import RunConfig

T = TypeVar("T")


class Inner(Protocol):
    """What an interval needs of `inner.InnerLoop`. All calls block."""

    def load(self, theta_N: Tensor) -> None: ...

    def train(self, sample_ids: Sequence[int], num_steps: int, stop: Callable[[], bool] = ...) -> IntervalResult: ...

    def flat(self) -> Tensor: ...

    def validate(self, theta_N: Tensor, num_batches: int) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Materials:
    """What a member trains with: its inner loop, and the weights that the run begins with."""

    inner: Inner
    theta_N: Tensor


def prepare(config: RunConfig, device: str = "cpu") -> Materials:
    """Those of the run's config. Blocks for seconds. Raises ConfigError or IntegrityError."""
    corpus = ByteCorpus.load(config.data, seed=config.seed)
    model = build_model(config.model)
    inner = InnerLoop(config.inner, model, corpus, device, fragments=config.fragments)
    warm_up()  # so that the first round does not wait for a compiler
    return Materials(inner=inner, theta_N=initial_theta(config))


def _diverged(how: str) -> RoundError:
    return RoundError(f"training diverged: {how}", remedy="lower inner.learning_rate in the run")


class Intervals:
    """Runs one interval at a time. `max_interval_s` bounds each, so that a slow machine brings what it can."""

    def __init__(self, inner: Inner, *, max_interval_s: float = math.inf) -> None:
        self._inner = inner
        self._max_interval_s = max_interval_s
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-training")

    def hurry(self) -> None:
        """End the running interval after its present step."""
        self._stop.set()

    async def train(self, theta_N: Tensor, sample_ids: Sequence[int], num_steps: int) -> tuple[IntervalResult, Tensor]:
        """The result, and the pseudo-gradient [N]. Raises RoundError if training diverged."""
        self._stop.clear()
        return await self._off_loop(self._train, theta_N, sample_ids, num_steps)

    async def validate(self, theta_N: Tensor, num_batches: int) -> float:
        return await self._off_loop(self._inner.validate, theta_N, num_batches)

    def between(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` where intervals run: after the present one, and before any that begins later."""
        return self._thread.submit(function)

    def close(self) -> None:
        """Stop, and wait for the present step's end."""
        self._stop.set()
        self._thread.shutdown(cancel_futures=True)

    def _train(self, theta_N: Tensor, sample_ids: Sequence[int], num_steps: int) -> tuple[IntervalResult, Tensor]:
        until = time.monotonic() + self._max_interval_s
        self._inner.load(theta_N)
        result = self._inner.train(sample_ids, num_steps, lambda: self._stop.is_set() or time.monotonic() > until)
        delta_N = theta_N - self._inner.flat()
        # the mean of no losses is not a number, and no reason
        if result.num_steps and not abs(result.mean_loss) <= limits.MAX_LOSS:
            raise _diverged(f"the loss is {result.mean_loss:g}")
        if not bool(torch.isfinite(delta_N).all()):
            raise _diverged("a parameter is not finite")
        return result, delta_N

    async def _off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
