"""One replica's inner optimizer with its learning rate, from the run's settings, and its state for a checkpoint.

"adamw" updates everything by AdamW. "muon" updates the hidden layers' matrices by Muon, and the embeddings, the head
and all vectors by AdamW: one learning rate and weight decay serve both.

AdamW, which most runs use, is called as a function. The first object of torch's optimizer classes would import torch's
compiler, which takes as long as importing torch, and 70 MB.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from swarm_protocol.errors import IntegrityError
from torch import Tensor, nn
from torch.optim.adamw import adamw

from swarm.training.run.layout import layer_of
from swarm.training.run.run_tables import InnerConfig

NO_MOMENTS: Mapping[str, Tensor] = {"num_steps": torch.tensor([0])}
"""The state of an optimizer that has taken no step."""
RESTART_STEPS = 10
"""Steps of the warm-up after each reset of the moments (`fresh_moments`), at most half of the interval. Without it, the
first steps move every parameter by the full learning rate (`tests/bench/test_bench_validation.py`)."""


def schedule_factor(config: InnerConfig, done_steps: int, total_steps: int) -> float:
    """Return the schedule's factor of the learning rate for the run's inner step `done_steps`, from 0, of
    `total_steps`.

    "linear" and "cosine" fall from 1 to `final_ratio` at the last step. "cosine" is half a period (Loshchilov and
    Hutter 2017, arXiv 1608.03983, without restarts). Later steps, which slow members may take, have the factor of the
    last one.
    """
    progress = min(1.0, done_steps / max(1, total_steps - 1))
    match config.schedule:
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            return 1.0
    return config.final_ratio + (1.0 - config.final_ratio) * left


def restart_factor(steps_since: int, interval_steps: int) -> float:
    """Return the factor of the learning rate `steps_since` steps after a reset of the moments, in an interval of
    `interval_steps`."""
    return min(1.0, (steps_since + 1) / (min(RESTART_STEPS, interval_steps // 2) + 1))


def warmup_factor(config: InnerConfig, own_steps: int) -> float:
    """Return the warm-up's factor of the learning rate after `own_steps` steps. The first moments are inaccurate."""
    return min(1.0, (own_steps + 1) / (config.warmup_steps + 1))


_EPSILON = 1e-8
"""AdamW adds it to the root of the second moment. torch has the same default."""


class UpdateRule(ABC):
    """Updates `parameters` from their gradients. `moments` has, by the moment's name, a tensor for each parameter. It
    is empty before the first step."""

    moment_names: ClassVar[tuple[str, ...]]

    def __init__(self, config: InnerConfig, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.moments: Mapping[str, Sequence[Tensor]] = {}
        self._config = config

    def begin(self, _num_steps: int, moments: Mapping[str, Sequence[Tensor]]) -> None:
        """Continue from `moments`, which are those after `_num_steps` steps."""
        self.moments = moments

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters, each of which must have a gradient."""
        if not self.moments:
            self.begin(0, {name: [torch.zeros_like(each) for each in self.parameters] for name in self.moment_names})
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        self._update(gradients, learning_rate)

    @abstractmethod
    def _update(self, gradients: list[Tensor], learning_rate: float) -> None:
        """Update moments and parameters."""


class AdamW(UpdateRule):
    """torch's AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101). Vectors (norms and biases) have no weight decay."""

    moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: InnerConfig, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._num_steps: list[Tensor] = []

    def begin(self, num_steps: int, moments: Mapping[str, Sequence[Tensor]]) -> None:
        super().begin(num_steps, moments)
        # torch has a step count for each parameter, on its device
        self._num_steps = [torch.tensor(float(num_steps), device=each.device) for each in self.parameters]

    def _update(self, gradients: list[Tensor], learning_rate: float) -> None:
        config, columns = self._config, (self.parameters, gradients, *self.moments.values(), self._num_steps)
        rows = list(zip(*columns, strict=True))
        matrices = [row for row in rows if row[0].dim() >= 2]
        vectors = [row for row in rows if row[0].dim() < 2]
        for chosen, weight_decay in ((matrices, config.weight_decay), (vectors, 0.0)):
            if chosen:
                parameters, slopes, means, squares, counts = map(list, zip(*chosen, strict=True))
                adamw(
                    parameters,
                    slopes,
                    means,
                    squares,
                    [],
                    counts,
                    fused=True,
                    amsgrad=False,
                    beta1=config.beta1,
                    beta2=config.beta2,
                    lr=learning_rate,
                    weight_decay=weight_decay,
                    eps=_EPSILON,
                    maximize=False,
                )


class Muon(UpdateRule):
    """torch's Muon for matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon). The learning rate is
    scaled so that updates are as large as AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""

    moment_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(self, config: InnerConfig, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._optimizer: torch.optim.Optimizer = torch.optim.Muon(
            parameters,
            momentum=config.muon_momentum,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )

    def begin(self, num_steps: int, moments: Mapping[str, Sequence[Tensor]]) -> None:
        super().begin(num_steps, moments)
        for parameter, *its_moments in zip(self.parameters, *moments.values(), strict=False):
            self._optimizer.state[parameter] = dict(zip(moments, its_moments, strict=True))

    def _update(self, _gradients: list[Tensor], learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()


class InnerOptimizer:
    """Updates `parameters`, given by name, from their gradients, except frozen ones."""

    def __init__(self, config: InnerConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self._config = config
        self._num_steps = 0
        moved = {name: each for name, each in sorted(parameters.items()) if each.requires_grad}
        matrices = {name: each for name, each in moved.items() if config.optimizer == "muon" and _is_hidden(name, each)}
        rest = [each for name, each in moved.items() if name not in matrices]
        self._rules: dict[str, UpdateRule] = {}
        if rest:
            self._rules["adamw"] = AdamW(config, rest)
        if matrices:
            self._rules["muon"] = Muon(config, list(matrices.values()))

    def step(self, factor: float) -> None:
        """Update the parameters with the learning rate times `factor`, and times this replica's warm-up unless
        `fresh_moments` is set: `factor` then includes the warm-up."""
        warm_up = 1.0 if self._config.fresh_moments else warmup_factor(self._config, self._num_steps)
        rate = self._config.learning_rate * factor * warm_up
        for rule in self._rules.values():
            rule.step(rate)
        self._num_steps += 1

    def state(self) -> dict[str, list[Tensor]]:
        """Return the state for a checkpoint: `num_steps` (int64 [1]), and each moment as a flat fp32 vector, in one
        piece for each parameter. They are not copies: the next step changes them."""
        result = {"num_steps": [torch.tensor([self._num_steps])]}
        for kind, rule in self._rules.items():
            for moment, pieces in rule.moments.items():
                result[f"{kind}.{moment}"] = [each.reshape(-1) for each in pieces]
        return result

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore copies of what `state` returned, each vector in one piece. Raises IntegrityError, and changes
        nothing, if it is of another model or optimizer."""
        num_steps = self._checked(state)
        for kind, rule in self._rules.items():
            names = rule.moment_names if num_steps else ()
            rule.begin(num_steps, {name: _as_pieces(state[f"{kind}.{name}"], rule) for name in names})
        self._num_steps = num_steps

    def _checked(self, state: Mapping[str, Tensor]) -> int:
        """Return the number of steps of `state`. Raises IntegrityError if it does not fit this optimizer."""
        counted = state.get("num_steps", torch.tensor([]))
        num_steps = int(counted.item()) if counted.shape == (1,) and not counted.is_floating_point() else -1
        expected = {"num_steps": 1}
        if num_steps:
            for kind, rule in self._rules.items():
                size = sum(each.numel() for each in rule.parameters)
                expected |= {f"{kind}.{moment}": size for moment in rule.moment_names}
        found = {key: value.numel() if value.dim() == 1 else -1 for key, value in state.items()}
        if num_steps < 0 or found != expected:
            raise IntegrityError(
                f"these moments are not of this model's {self._config.optimizer}: {_sizes(found)}, not "
                f"{_sizes(expected)}",
                remedy="resume without them",
            )
        return num_steps


def _as_pieces(values: Tensor, rule: UpdateRule) -> list[Tensor]:
    """Return copies of the pieces of the flat `values`, each with the shape and on the device of one of the rule's
    parameters."""
    pieces = torch.split(values, [each.numel() for each in rule.parameters])
    return [
        piece.view(each.shape).to(each.device, copy=True) for piece, each in zip(pieces, rule.parameters, strict=True)
    ]


def _is_hidden(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and layer_of(name) is not None


def _sizes(found: Mapping[str, int]) -> str:
    return ", ".join(f"{key[:40]} [{size}]" for key, size in sorted(found.items())[:8])
