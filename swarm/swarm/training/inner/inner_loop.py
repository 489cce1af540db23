"""One replica's interval: inner steps on leased samples, and the validation loss.

Everything here blocks: the caller runs it in an executor, one call at a time. How many threads torch uses is the
caller's choice. The optimizer's moments stay on this replica. What computes is one device, or several in worker
processes; this is what both have in common: data, schedule, and what an interval came to.

Shapes: T tokens a window, V windows of validation, N values of the flat parameter vector, F of a slice of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from swarm_protocol.errors import RoundError
from torch import Tensor, nn

from swarm.training.data.corpus import Corpus
from swarm.training.inner.one_device import (
    ONE_CPU,
    VALIDATION_WINDOWS,
    LocalOptions,
    LossFunction,
    OneDevice,
    next_token_loss,
)
from swarm.training.inner.optimizers import schedule_factor
from swarm.training.inner.several_devices import SeveralDevices
from swarm.training.run.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalResult:
    """`num_samples` of the given samples, from the first on, were used. `mean_loss` is nan if no step was taken."""

    num_steps: int
    num_samples: int
    num_tokens: int
    mean_loss: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class Stepper(Protocol):
    """What computes a step: see `OneDevice` for what each means."""

    def load(self, theta_N: Tensor) -> None: ...

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None: ...

    def flat(self, where: slice) -> Tensor: ...

    def step(self, x_BT: Tensor, factor: float) -> float: ...

    def release_gradient(self) -> None: ...

    def loss(self, theta_N: Tensor, x_VT: Tensor) -> float: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: Mapping[str, Tensor]) -> None: ...

    def close(self) -> None: ...


class InnerLoop:
    """Trains `model`, which it owns from then on, as `run` and this member's `local` options say.

    The warm-up counts this replica's own steps. Raises ConfigError if the options do not fit the model.
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
        self._config = run.inner
        self._total_steps = run.outer_steps * run.interval_steps
        self._corpus = corpus
        self._stepper: Stepper
        if len(local.devices) > 1:
            self._stepper = SeveralDevices(run.inner, model, fragments=run.fragments, local=local, loss=loss)
        else:
            device = local.devices[0]
            self._stepper = OneDevice(run.inner, model, device=device, fragments=run.fragments, local=local, loss=loss)

    def load(self, theta_N: Tensor) -> None:
        """Set the parameters; moments and warm-up stay as they are. Raises ValueError if N differs, and RoundError if
        worker processes fail, as all other calls do then until this one succeeds."""
        self._stepper.load(theta_N)

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None:
        """Make that slice `mixing` times itself and 1 - `mixing` times `theta_F` (Streaming DiLoCo's alpha, arXiv
        2501.18512, section 2.3); moments and the other parameters stay. Raises ValueError if F differs."""
        self._stepper.take_in(where, theta_F, mixing)

    def flat(self, where: slice = slice(None)) -> Tensor:
        """fp32 CPU [F]: a copy of that slice of the parameters."""
        return self._stepper.flat(where)

    def train(
        self,
        sample_ids: Sequence[int],
        num_steps: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        done_steps: int = 0,
    ) -> IntervalResult:
        """Take `num_steps` steps, each on the next `batch_windows` of `sample_ids`; the run's progress before them,
        for the schedule, is `done_steps` inner steps.

        It ends early if the samples run out, or if `stop`, asked before each step, says so.

        Deterministic on one CPU with a fixed number of threads, given the parameters, the moments and the samples.
        Raises RoundError if the loss or the gradient is not finite, or a device has no memory left. The moments are
        then those before that step; whatever raises it, `load` comes before the next steps.
        """
        started = time.perf_counter()
        size = self._config.batch_windows
        losses: list[float] = []
        while len(losses) < min(num_steps, len(sample_ids) // size) and not stop():
            first = len(losses) * size
            losses.append(self._step(sample_ids[first : first + size], done_steps + len(losses)))
        self._stepper.release_gradient()
        return IntervalResult(
            num_steps=len(losses),
            num_samples=len(losses) * size,
            num_tokens=len(losses) * size * self._corpus.window_tokens,
            mean_loss=sum(losses) / len(losses) if losses else math.nan,
            seconds=time.perf_counter() - started,
        )

    def validate(self, theta_N: Tensor, num_batches: int) -> float:
        """Mean loss of `theta_N` on the first windows of the held-out files. The parameters being trained stay."""
        starts = range(0, num_batches * VALIDATION_WINDOWS, VALIDATION_WINDOWS)
        x_VT = torch.cat([self._corpus.validation_batch(start, VALIDATION_WINDOWS) for start in starts])
        return self._stepper.loss(theta_N, x_VT) / len(x_VT)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: the number of steps, and copies of the moments as flat CPU vectors, in the names' order."""
        return self._stepper.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned. Raises IntegrityError if that is of another model or optimizer."""
        self._stepper.load_state(state)

    def close(self) -> None:
        """End worker processes, if there are any. Idempotent."""
        self._stepper.close()

    def _step(self, sample_ids: Sequence[int], done_steps: int) -> float:
        factor = schedule_factor(self._config, done_steps, self._total_steps)
        try:
            return self._stepper.step(self._corpus.batch(sample_ids), factor)
        except torch.OutOfMemoryError as error:
            raise RoundError(
                f"the device has no memory left for a step: {str(error).splitlines()[0][:200]}",
                remedy="use fewer micro_batch_windows, or activation_checkpointing",
            ) from error
