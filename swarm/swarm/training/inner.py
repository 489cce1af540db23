"""One replica's interval: inner AdamW steps on leased samples, and the validation loss.

Everything here blocks: the caller runs it in an executor, one call at a time. How many threads torch uses is the
caller's choice. AdamW's moments stay on this replica.

Shapes: B samples a step, T tokens a window, N values of the flat parameter vector.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from swarm_protocol.errors import RoundError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from swarm.training.data import ByteCorpus
from swarm.training.layout import Layout
from swarm.training.run_config import InnerConfig

VALIDATION_WINDOWS = 16
"""Windows in a validation batch."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


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


class InnerLoop:
    """Trains `model`, which it owns from then on, in fp32 on `device`, without dropout.

    The warm-up counts this replica's own steps.
    """

    def __init__(
        self, config: InnerConfig, model: nn.Module, corpus: ByteCorpus, device: str = "cpu", *, fragments: int = 1
    ) -> None:
        self._config = config
        self._corpus = corpus
        self._device = torch.device(device)
        # dropout draws from torch's global generator, so no one could repeat a step: it stays off
        self._model = model.to(self._device).eval()
        self._layout = Layout.of(model, fragments)
        self._parameters = self._layout.parameters(model)
        self._num_steps = 0
        # norms and biases, the vectors, are not pulled towards zero
        groups: list[dict[str, Any]] = [
            {"params": [parameter for parameter in self._parameters if parameter.dim() >= 2]},
            {"params": [parameter for parameter in self._parameters if parameter.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def load(self, theta_N: Tensor) -> None:
        """Set the parameters; AdamW's moments and the warm-up stay as they are. Raises ValueError if N differs."""
        self._layout.set_parameters(self._model, theta_N)

    def flat(self) -> Tensor:
        """fp32 CPU [N]: a copy of the parameters."""
        return self._layout.flatten(self._model)

    def train(
        self, sample_ids: Sequence[int], num_steps: int, stop: Callable[[], bool] = lambda: False
    ) -> IntervalResult:
        """Take `num_steps` steps, each on the next `batch_windows` of `sample_ids`.

        It ends early if the samples run out, or if `stop`, asked before each step, says so.

        Deterministic on a CPU with a fixed number of threads, given the parameters, AdamW's moments and the samples.
        Raises RoundError if the loss or the gradient is not finite. AdamW's moments are then those before that step.
        """
        started = time.perf_counter()
        size = self._config.batch_windows
        losses: list[float] = []
        while len(losses) < min(num_steps, len(sample_ids) // size) and not stop():
            first = len(losses) * size
            losses.append(self._step(sample_ids[first : first + size]))
        return IntervalResult(
            num_steps=len(losses),
            num_samples=len(losses) * size,
            num_tokens=len(losses) * size * self._corpus.window_tokens,
            mean_loss=sum(losses) / len(losses) if losses else math.nan,
            seconds=time.perf_counter() - started,
        )

    def validate(self, theta_N: Tensor, num_batches: int) -> float:
        """Mean loss of `theta_N` on the first windows of the held-out files. The parameters being trained stay."""
        pieces = {name: piece.to(self._device) for name, piece in self._layout.unflatten(theta_N).items()}
        total, count = 0.0, 0
        with torch.no_grad():
            for index in range(num_batches):
                x_BT = self._corpus.validation_batch(index * VALIDATION_WINDOWS, VALIDATION_WINDOWS)
                if len(x_BT):
                    total += self._loss(x_BT, pieces).item() * len(x_BT)
                    count += len(x_BT)
        return total / count

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: the number of steps, and copies of AdamW's moments as flat CPU vectors."""
        result = {"num_steps": torch.tensor([self._num_steps])}
        if self._num_steps:
            for key in _MOMENTS:
                moments = [self._optimizer.state[parameter][key].reshape(-1) for parameter in self._parameters]
                result[key] = torch.cat(moments).cpu()
        return result

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned. Raises ValueError if that is of another model."""
        num_steps = int(state["num_steps"].item())
        if num_steps:
            moments = {key: self._layout.unflatten(state[key].to(self._device)) for key in _MOMENTS}
            for name, parameter in zip(self._layout.names, self._parameters, strict=True):
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(num_steps), device=self._device),
                    **{key: pieces[name].clone() for key, pieces in moments.items()},
                }
        self._num_steps = num_steps

    def _step(self, sample_ids: Sequence[int]) -> float:
        loss = self._loss(self._corpus.batch(sample_ids), {})
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._parameters, self._config.clip_norm)
        value = loss.item()
        if not math.isfinite(value) or not math.isfinite(norm.item()):
            raise RoundError(
                f"training diverged: the loss is {value}, the norm of the gradient {norm.item()}",
                remedy="if this happens again, the run needs a lower inner.learning_rate",
            )
        warmup = min(1.0, (self._num_steps + 1) / (self._config.warmup_steps + 1))
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._config.learning_rate * warmup
        self._optimizer.step()
        self._num_steps += 1
        return value

    def _loss(self, x_BT: Tensor, pieces: dict[str, Tensor]) -> Tensor:
        """Of the model, with `pieces` in place of its parameters of those names; `x_BT` is [B, T+1]."""
        x_BT = x_BT.to(self._device)
        inputs = {"input_ids": x_BT[:, :-1], "use_cache": False}
        logits_BTV = torch.func.functional_call(self._model, pieces, args=(), kwargs=inputs).logits
        return cross_entropy(logits_BTV.flatten(0, 1).float(), x_BT[:, 1:].flatten())
