"""One replica's interval: inner AdamW steps on leased samples, and the validation loss.

Everything blocks; the caller runs it in an executor and owns the loop, one call at a time. How many threads torch uses
is the caller's choice. AdamW's moments stay on this replica.
Shapes: B samples a step, T tokens a window, N values of the flat parameter vector.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from swarm.training.data import ByteCorpus
from swarm.training.model import flatten, named_parameters, views
from swarm.training.run_config import InnerConfig
from swarm_protocol.errors import RoundError

VALIDATION_WINDOWS = 16
"""Windows in one validation batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalResult:
    """`num_samples` of the given samples, from the first on, were used. `mean_loss` is nan if there was no step."""

    num_steps: int
    num_samples: int
    num_tokens: int
    mean_loss: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class InnerLoop:
    """Trains `model` in place, in fp32 on `device`. The warm-up counts this replica's own steps."""

    def __init__(self, config: InnerConfig, model: nn.Module, corpus: ByteCorpus, device: str = "cpu") -> None:
        self._config = config
        self._corpus = corpus
        self._device = torch.device(device)
        self._model = model.to(self._device)
        self._parameters = [parameter for _, parameter in named_parameters(model)]
        self._num_steps = 0
        decayed = [parameter for parameter in self._parameters if parameter.dim() >= 2]
        others = [parameter for parameter in self._parameters if parameter.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def load(self, theta_N: Tensor) -> None:
        """Set the parameters. AdamW's moments and the warm-up go on from where they are."""
        pieces = views(theta_N, self._model)
        with torch.no_grad():
            for name, parameter in named_parameters(self._model):
                parameter.copy_(pieces[name])

    def flat(self) -> Tensor:
        """fp32 CPU [N]: a copy of the parameters."""
        return flatten(self._model)

    def train(
        self, sample_ids: Sequence[int], num_steps: int, stop: Callable[[], bool] = lambda: False
    ) -> IntervalResult:
        """Up to `num_steps` steps, each on the next `batch_windows` of `sample_ids`; fewer if those run out or `stop` says so.

        Deterministic on one machine given the parameters, AdamW's moments and the samples. Raises RoundError if loss or gradient
        stops being finite; the parameters then need a `load`, while the moments are as before that step.
        """
        started, losses = time.perf_counter(), 0.0
        size = self._config.batch_windows
        num_done = 0
        self._model.train()
        while num_done < num_steps and (num_done + 1) * size <= len(sample_ids) and not stop():
            losses += self._step(sample_ids[num_done * size : (num_done + 1) * size])
            num_done += 1
        return IntervalResult(
            num_steps=num_done,
            num_samples=num_done * size,
            num_tokens=num_done * size * self._corpus.window_tokens,
            mean_loss=losses / num_done if num_done else math.nan,
            seconds=time.perf_counter() - started,
        )

    def validate(self, theta_N: Tensor, num_batches: int) -> float:
        """Mean loss of `theta_N`, not of the local parameters, on the first windows of the held-out files."""
        pieces = {name: piece.to(self._device) for name, piece in views(theta_N, self._model).items()}
        self._model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for index in range(num_batches):
                x_BT = self._corpus.validation_batch(index * VALIDATION_WINDOWS, VALIDATION_WINDOWS)
                if not len(x_BT):
                    break
                total += self._loss(x_BT, pieces).item() * len(x_BT)
                count += len(x_BT)
        return total / count

    def state(self) -> dict[str, Tensor]:
        """AdamW's moments as flat CPU vectors, and the step count, for a checkpoint. Copies."""
        result = {"num_steps": torch.tensor([self._num_steps])}
        if self._num_steps:
            for key in ("exp_avg", "exp_avg_sq"):
                moments = (self._optimizer.state[parameter][key].reshape(-1) for parameter in self._parameters)
                result[key] = torch.cat([moment.cpu() for moment in moments])
        return result

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on with what `state` returned. Raises ValueError if it is from another model."""
        self._num_steps = int(state["num_steps"].item())
        if not self._num_steps:
            return
        sizes = [parameter.numel() for parameter in self._parameters]
        moments = {key: state[key].split(sizes) for key in ("exp_avg", "exp_avg_sq")}
        for index, parameter in enumerate(self._parameters):
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(self._num_steps), device=self._device),
                **{
                    key: pieces[index].clone().view(parameter.shape).to(self._device)
                    for key, pieces in moments.items()
                },
            }

    def _step(self, ids: Sequence[int]) -> float:
        loss = self._loss(self._corpus.batch(ids))
        value = loss.item()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.clip_norm).item()
        if not math.isfinite(value) or not math.isfinite(norm):
            raise RoundError(
                f"training diverged: loss {value}, gradient norm {norm}", remedy="lower inner.learning_rate in the run"
            )
        warmup = min(1.0, (self._num_steps + 1) / (self._config.warmup_steps + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * warmup
        self._optimizer.step()
        self._num_steps += 1
        return value

    def _loss(self, x_BT: Tensor, pieces: dict[str, Tensor] | None = None) -> Tensor:
        x_BT = x_BT.to(self._device)
        inputs = {"input_ids": x_BT[:, :-1], "use_cache": False}
        output = torch.func.functional_call(self._model, pieces or {}, args=(), kwargs=inputs)
        return F.cross_entropy(output.logits.flatten(0, 1).float(), x_BT[:, 1:].flatten())
