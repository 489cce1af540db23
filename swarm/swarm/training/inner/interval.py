"""A member's inner steps between two outer steps, in the one thread that trains, and the held-out loss of committed
states.

`Intervals` owns that thread. An `Interval` trains off the event loop, in one or several stretches, until it is told to
stop. `interval_loop` begins the intervals and chooses their leases. `HeldOutLoss` measures the committed state on
held-out data at the run's start and end, and every `validation_interval` steps. All members have the same state and
data, so they measure the same loss, except for their devices' rounding. `MemberMomentum` averages a member's
pseudo-gradients.

Shapes: N values of the flat parameter vector, F of a fragment.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from swarm_compression import warm_up
from swarm_compression.codec import magnitude
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, RoundError
from swarm_protocol.records import ValidationReport
from torch import Tensor

from swarm.heap import give_back, release_code
from swarm.threads import in_executor
from swarm.training.data.corpus import load_corpus
from swarm.training.data.local_data import DEFAULT_DATA, LocalData
from swarm.training.inner.inner_loop import InnerLoop, IntervalResult
from swarm.training.inner.one_device import ONE_CPU, LocalOptions
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.state.replica_state import ReplicaState

logger = logging.getLogger(__name__)


T = TypeVar("T")

NUM_HELD_OUT_WINDOWS = 64


class Inner(Protocol):
    """The interface of `InnerLoop` and `ModuleInner` to an interval. All calls block, and come from one thread at a
    time."""

    def load(self, theta_N: Tensor) -> None: ...

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None: ...

    def train(
        self, sample_ids: Sequence[int], num_steps: int, stop: Callable[[], bool] = ..., *, done_steps: int = ...
    ) -> IntervalResult: ...

    def flat(self, where: slice = ...) -> Tensor: ...

    def held_out_loss(self, theta_N: Tensor, num_windows: int, draw: int = ...) -> float: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingSetup:
    """Everything that a member needs to train: its inner loop, the run's initial weights, and the `Layout.bounds`
    (empty: the model is one fragment). `RunMember` takes the weights with `take_weights`, so that nothing else keeps
    them in memory.

    If the run starts from a checkpoint, `theta_N` is zeros, and `bring`, which blocks, returns the weights. A member
    that joins a running run does not call it.
    """

    inner: Inner
    theta_N: Tensor
    bounds: tuple[int, ...] = ()
    bring: Callable[[], Tensor] | None = None

    def take_weights(self) -> Tensor:
        """Return the run's initial weights [N], and drop this reference to them."""
        theta_N, self.theta_N = self.theta_N, torch.empty(0)
        return theta_N


def prepare(
    config: RunConfig,
    local: LocalOptions = ONE_CPU,
    data: LocalData = DEFAULT_DATA,
    bring: Callable[[], Tensor] | None = None,
    moments: Mapping[str, Tensor] | None = None,
) -> TrainingSetup:
    """Make the setup of a run's config on this machine. Blocks for seconds, or until the data is tokenized.

    `bring` is that of `TrainingSetup`, for a run that starts from a checkpoint. `moments` are those of the member's
    newest checkpoint. Raises ConfigError or IntegrityError.
    """
    has_checkpoint = bool(config.start.checkpoint)
    if has_checkpoint and bring is None:
        raise ConfigError(
            "the run starts from a checkpoint, and no function to fetch it was given", remedy="use swarm.Trainer"
        )
    theta_N = torch.empty(0) if has_checkpoint else initial_theta(config)
    model = build_model(config.model)
    vocab_size = int(getattr(getattr(model, "config", None), "vocab_size", 0))
    corpus = load_corpus(config.data, seed=config.seed, vocab_size=vocab_size, local=data)
    layout = Layout.of(model, config.fragments)
    warm_up()  # so that the first round does not wait for a compiler
    # last, since it may start worker processes, which the caller must end
    inner = InnerLoop(config, model, corpus, local)
    if moments is not None:
        try:
            inner.load_state(moments)
        except BaseException:
            inner.close()
            raise
    give_back()
    release_code()
    if has_checkpoint:
        theta_N = torch.zeros(layout.num_values)
    return TrainingSetup(inner=inner, theta_N=theta_N, bounds=layout.bounds, bring=bring if has_checkpoint else None)


class Intervals:
    """Owns the thread that trains. Each interval ends after `max_interval_s` by `clock`, so that a slow machine
    contributes the steps that it has done."""

    def __init__(
        self, inner: Inner, *, max_interval_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inner = inner
        self.max_interval_s = max_interval_s
        self.clock = clock
        self.is_leaving = threading.Event()
        """Set once this member has stopped training and recomputing others' intervals."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-training")
        self._latest: Interval | None = None

    def begin(self, done_steps: int = 0) -> Interval:
        """Begin the next interval. The one before it ends after its present step."""
        self.stop()
        self._latest = Interval(self, done_steps)
        return self._latest

    def hurry(self) -> None:
        """End the running interval after its present step, or its first one."""
        if self._latest is not None:
            self._latest.hurry()

    def stop(self) -> None:
        """End the running interval after its present step, also if it has none."""
        if self._latest is not None:
            self._latest.stop()

    def leave(self) -> None:
        """End the thread's work after its present step. The running interval keeps its steps; later ones take none."""
        self.is_leaving.set()
        self.stop()

    def held_out_loss(self, theta_N: Tensor) -> asyncio.Future[float]:
        """Measure the loss of `theta_N` on held-out data, before all later requests to the thread."""
        return self.off_loop(self.inner.held_out_loss, theta_N, NUM_HELD_OUT_WINDOWS)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` in the thread that trains: after its present work, and before all later requests."""
        return self._thread.submit(function)

    def close(self) -> None:
        """Stop, wait for the end of the present step, and close the inner loop."""
        self.leave()
        self._thread.shutdown(cancel_futures=True)
        self.inner.close()

    def off_loop(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Call `function` in the thread that trains, before all later requests to it."""
        return in_executor(self._thread, function, *arguments)


class Interval:
    """One interval, which trains in one stretch or in several. The run has done `done_steps` inner steps before it.

    The time limit starts with the first stretch, and includes the time between stretches. `done` is the sum of the
    stretches so far; its `mean_loss` is nan before the first step.
    """

    def __init__(self, intervals: Intervals, done_steps: int) -> None:
        self._intervals = intervals
        self._done_before = done_steps
        self._is_hurried, self._is_stopped = threading.Event(), threading.Event()
        self._until: float | None = None
        self.done = IntervalResult(num_steps=0, num_samples=0, num_tokens=0, mean_loss=math.nan, seconds=0.0)

    def hurry(self) -> None:
        """Take no further step after the present one. If there was none yet, take one: a member without any work cannot
        leave an attempt whose coordinator never signs a group."""
        self._is_hurried.set()

    def stop(self) -> None:
        """Take no further step after the present one."""
        self._is_stopped.set()

    async def train(self, sample_ids: Sequence[int], num_steps: int) -> None:
        """Train until `num_steps` steps of the interval are done. `sample_ids` are those of the whole interval, equal
        in each stretch. Raises RoundError if training diverged."""
        if self._until is None:
            self._until = self._intervals.clock() + self._intervals.max_interval_s
        if (missing := num_steps - self.done.num_steps) > 0:
            self.done = await self._intervals.off_loop(self._stretch, sample_ids[self.done.num_samples :], missing)

    async def delta(self, theta_F: Tensor, where: slice) -> Tensor:
        """Return the pseudo-gradient: `theta_F`, the committed values at `where`, minus the trained ones. Raises
        RoundError if training diverged."""
        return await self._intervals.off_loop(self._delta, theta_F, where)

    def _stretch(self, sample_ids: Sequence[int], num_steps: int) -> IntervalResult:
        done, done_before = self.done, self._done_before + self.done.num_steps
        begun = itertools.count(done.num_steps)
        more = self._intervals.inner.train(
            sample_ids, num_steps, lambda: self._is_over(next(begun)), done_steps=done_before
        )
        # without steps the mean loss is nan, which does not mean divergence
        if more.num_steps and not abs(more.mean_loss) <= limits.MAX_LOSS:
            raise _diverged(f"the loss is {more.mean_loss:g}")
        if not (done.num_steps and more.num_steps):
            return more if more.num_steps else done
        num_steps = done.num_steps + more.num_steps
        return IntervalResult(
            num_steps=num_steps,
            num_samples=done.num_samples + more.num_samples,
            num_tokens=done.num_tokens + more.num_tokens,
            mean_loss=(done.mean_loss * done.num_steps + more.mean_loss * more.num_steps) / num_steps,
            seconds=done.seconds + more.seconds,
        )

    def _is_over(self, num_steps: int) -> bool:
        assert self._until is not None
        is_ended = self._is_stopped.is_set() or (self._is_hurried.is_set() and num_steps > 0)
        return is_ended or self._intervals.clock() > self._until

    def _delta(self, theta_F: Tensor, where: slice) -> Tensor:
        local_F = self._intervals.inner.flat(where)
        # `flat` returns a copy, whose memory is reused for the difference
        delta_F = torch.sub(theta_F, local_F, out=local_F)
        if not magnitude(delta_F) <= limits.MAX_PARAMETER_MOVE:
            raise _diverged("a parameter is not finite, or has moved absurdly far")
        return delta_F


def _diverged(how: str) -> RoundError:
    return RoundError(f"training diverged: {how}", remedy="lower inner.learning_rate in the run")


class MemberMomentum:
    """The moving averages of one member's pseudo-gradients, one for each fragment. The member contributes them in place
    of its last pseudo-gradients. `momentum` is at least 0 and less than 1.

    Averages of honest members lie closer together than single pseudo-gradients, so that liars have less room to hide
    between them (Karimireddy et al. 2021, arXiv 2012.10333, section 5). A contribution then depends on past intervals,
    too, so nobody can recompute it from one interval. The averages are not in the state or in checkpoints, and start
    again after a restart. They take 4 bytes for each value that the member has contributed to.
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._averages: dict[int, tuple[int, Tensor]] = {}

    def averaged(self, where: slice, delta_F: Tensor) -> Tensor:
        """Add `delta_F`, the pseudo-gradient of the fragment at `where`, and return the fragment's average, in which
        each pseudo-gradient counts `momentum` times as much as the next one. The average is corrected for its start at
        zero.
        """
        count, average_F = self._averages.get(where.start, (0, torch.zeros_like(delta_F)))
        average_F = average_F.mul_(self._momentum).add_(delta_F, alpha=1 - self._momentum)
        self._averages[where.start] = (count + 1, average_F)
        return average_F / (1 - self._momentum ** (count + 1))


class HeldOutLoss:
    """Measures the held-out loss of committed states. `newest` is the last finite measurement. `on_done` is called in
    the event loop after each measurement, with the outer step and the loss."""

    def __init__(self, config: RunConfig, intervals: Intervals, on_done: Callable[[int, float], None]) -> None:
        self.newest: ValidationReport | None = None
        self._config = config
        self._intervals = intervals
        self._on_done = on_done

    async def now(self, state: ReplicaState) -> None:
        """Measure `state`. A failure is only a warning, as in `soon`."""
        await self._report(state.outer_step, self._intervals.held_out_loss(state.theta_N))

    def soon(self, state: ReplicaState, tasks: asyncio.TaskGroup) -> None:
        """Measure `state`, if it is due, before all later requests to the thread that trains."""
        every = self._config.validation_interval
        if every and state.outer_step % every == 0 and state.outer_step < self._config.outer_steps:
            loss = self._intervals.held_out_loss(state.theta_N)
            tasks.create_task(self._report(state.outer_step, loss), name="held-out loss")

    async def _report(self, step: int, loss: asyncio.Future[float]) -> None:
        try:
            self._done(step, await loss)
        except (RoundError, torch.OutOfMemoryError) as error:  # the device may have just enough memory for training
            logger.warning("the held-out loss of outer step %d could not be measured: %s", step, error)

    def _done(self, step: int, loss: float) -> None:
        if abs(loss) <= limits.MAX_LOSS:
            self.newest = ValidationReport(outer_step=step, loss=loss)
        self._on_done(step, loss)
