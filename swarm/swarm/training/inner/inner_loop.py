"""One replica's interval: inner steps on leased samples, and the held-out loss.

`OneDevice` or `SeveralDevices` computes the steps. This module has what both share: data, schedule, and the result of
an interval. Everything here blocks: the caller runs it in an executor, one call at a time, and chooses torch's number
of threads. The optimizer's moments stay on this replica.

Shapes: T tokens a window, V held-out windows, N values of the flat parameter vector, F of a slice of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from swarm_protocol.errors import RoundError
from torch import Tensor, nn

from swarm.training.data.corpus import Corpus
from swarm.training.inner.one_device import (
    ONE_CPU,
    LocalOptions,
    LossFunction,
    OneDevice,
    next_token_loss,
)
from swarm.training.inner.optimizers import NO_MOMENTS, restart_factor, schedule_factor, warmup_factor
from swarm.training.inner.several_devices import SeveralDevices
from swarm.training.run.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalResult:
    """The result of an interval, which used the first `num_samples` of its samples. `mean_loss` is nan without
    steps."""

    num_steps: int
    num_samples: int
    num_tokens: int
    mean_loss: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


def take_steps(
    step: Callable[[Sequence[int], int], float],
    sample_ids: Sequence[int],
    num_steps: int,
    stop: Callable[[], bool],
    run: RunConfig,
) -> IntervalResult:
    """Take `num_steps` steps of an interval, or fewer if the samples run out or `stop` returns True. `step` gets the
    next `batch_windows` of `sample_ids` and the number of steps before, and returns the loss. Blocks."""
    started, size = time.perf_counter(), run.inner.batch_windows
    losses: list[float] = []
    while len(losses) < min(num_steps, len(sample_ids) // size) and not stop():
        first = len(losses) * size
        losses.append(step(sample_ids[first : first + size], len(losses)))
    return IntervalResult(
        num_steps=len(losses),
        num_samples=len(losses) * size,
        num_tokens=len(losses) * size * run.data.window_tokens,
        mean_loss=sum(losses) / len(losses) if losses else math.nan,
        seconds=time.perf_counter() - started,
    )


class InnerLoop:
    """Trains `model`, which it then owns, with the settings of `run` and this member's `local` options.

    The warm-up counts this replica's steps, or with `fresh_moments` the run's. Raises ConfigError if the options do not
    fit the model.
    """

    def __init__(
        self,
        run: RunConfig,
        model: nn.Module,
        corpus: Corpus,
        local: LocalOptions = ONE_CPU,
        *,
        loss: LossFunction = next_token_loss,
    ) -> None:
        self._run, self._config = run, run.inner
        self._corpus = corpus
        self._device: OneDevice | SeveralDevices
        if len(local.devices) > 1:
            self._device = SeveralDevices(run.inner, model, fragments=run.fragments, local=local, loss=loss)
        else:
            device = local.devices[0]
            self._device = OneDevice(run.inner, model, device=device, fragments=run.fragments, local=local, loss=loss)

    def load(self, theta_N: Tensor) -> None:
        """Set the parameters; moments and warm-up do not change. Raises ValueError if N differs, and RoundError if
        worker processes fail. All other calls then raise RoundError until a `load` succeeds."""
        self._device.load(theta_N)

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None:
        """Replace the slice `where` by `mixing` times itself plus 1 - `mixing` times `theta_F` (Streaming DiLoCo's
        alpha, arXiv 2501.18512, section 2.3). Moments and other parameters do not change. Raises ValueError if F
        differs."""
        self._device.take_in(where, theta_F, mixing)

    def flat(self, where: slice = slice(None)) -> Tensor:
        """Return fp32 CPU [F]: a copy of the slice `where` of the parameters."""
        return self._device.flat(where)

    def train(
        self,
        sample_ids: Sequence[int],
        num_steps: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        done_steps: int = 0,
    ) -> IntervalResult:
        """Take `num_steps` steps, each on the next `batch_windows` of `sample_ids`. `done_steps` are the run's inner
        steps before them, for the schedule.

        Ends early if the samples run out, or if `stop`, which is called before each step, returns True.

        Deterministic on one CPU with a fixed number of threads, given the parameters, the moments and the samples; with
        fresh moments, given the parameters, `done_steps` and the samples. Raises RoundError if the loss or the gradient
        is not finite, or a device is out of memory. The moments are then those before that step. After a RoundError,
        call `load` before the next steps.
        """
        if self._config.fresh_moments:
            self._device.load_state(NO_MOMENTS)

        def step(batch_ids: Sequence[int], index: int) -> float:
            return self._step(batch_ids, done_steps + index, index)

        result = take_steps(step, sample_ids, num_steps, stop, self._run)
        self._device.release_gradient()
        return result

    def held_out_loss(self, theta_N: Tensor, num_windows: int, draw: int = 0) -> float:
        """Return the mean loss of `theta_N` on `num_windows` consecutive windows of the held-out files, or all if there
        are fewer. `draw`, any whole number, determines the first one; with 0 it is the first of the files. The trained
        parameters do not change."""
        start = draw % max(1, self._corpus.num_validation_windows - num_windows + 1)
        x_VT = self._corpus.validation_batch(start, num_windows)
        return self._device.loss(theta_N, x_VT) / len(x_VT)

    def state(self) -> dict[str, list[Tensor]]:
        """Return the state for a checkpoint: the number of steps, and the moments as flat vectors, each in pieces that
        may be on the device. They are not copies: the next step changes them."""
        return self._device.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, each vector in one piece. Raises IntegrityError if it is of another model or
        optimizer."""
        self._device.load_state(state)

    def close(self) -> None:
        """End worker processes, if there are any. A second call does nothing."""
        self._device.close()

    def _step(self, sample_ids: Sequence[int], done_steps: int, index: int) -> float:
        """Take step `index` of a call of `train`. `done_steps` are the run's steps before it."""
        factor = schedule_factor(self._config, done_steps, self._run.outer_steps * self._run.interval_steps)
        if self._config.fresh_moments:
            factor *= warmup_factor(self._config, done_steps) * restart_factor(index, self._run.interval_steps)
        try:
            return self._device.step(self._corpus.batch(sample_ids), factor)
        except torch.OutOfMemoryError as error:
            raise RoundError(
                f"the device has no memory left for a step: {str(error).splitlines()[0][:200]}",
                remedy="use fewer micro_batch_windows, or activation_checkpointing",
            ) from error
