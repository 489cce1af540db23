"""The rules by which an inner step moves parameters, each with the moments that it keeps of them: AdamW and Muon.

They are functions of tensors. The first of torch's optimizer objects imports its compiler, which takes as long as
importing torch, and 70 MB.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from swarm.training.run.run_tables import InnerConfig

_EPSILON = 1e-8
"""AdamW adds it to the root of the second moment, as torch's does."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_LEAST_NORM = 1e-7


class UpdateRule(ABC):
    """Updates `parameters` from their gradients. `moments` has a tensor for each of them by the moment's name, and
    nothing before the first step."""

    moment_names: ClassVar[tuple[str, ...]]

    def __init__(self, config: InnerConfig, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.moments: Mapping[str, Sequence[Tensor]] = {}
        self._config = config

    def begin(self, _num_steps: int, moments: Mapping[str, Sequence[Tensor]]) -> None:
        """Go on with these `moments`, after so many steps."""
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
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), torch's. Vectors, which are norms and biases, do not
    decay."""

    moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: InnerConfig, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._num_steps: list[Tensor] = []

    def begin(self, num_steps: int, moments: Mapping[str, Sequence[Tensor]]) -> None:
        super().begin(num_steps, moments)
        # torch counts for each parameter, on its device
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
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), of matrices, with the bits of torch's. The
    learning rate is scaled so that updates are as large as AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""

    moment_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def _update(self, gradients: list[Tensor], learning_rate: float) -> None:
        config = self._config
        for x, gradient, momentum in zip(self.parameters, gradients, *self.moments.values(), strict=True):
            momentum.lerp_(gradient, 1 - config.muon_momentum)
            update = orthogonal(gradient.lerp(momentum, config.muon_momentum))  # Nesterov's
            x.mul_(1 - learning_rate * config.weight_decay)
            x.add_(update, alpha=-(learning_rate * (0.2 * math.sqrt(max(x.shape)))))


def orthogonal(x_MN: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrix, in bfloat16: with the singular vectors of `x_MN`, and singular values
    between 0.6 and 1.3.

    Newton and Schulz's iteration with the coefficients of Jordan et al., which bring small values near 1 quickly, and
    none to it.
    """
    a, b, c = _COEFFICIENTS
    is_tall = x_MN.shape[0] > x_MN.shape[1]
    y_MN = x_MN.bfloat16()
    if is_tall:
        y_MN = y_MN.T
    y_MN = y_MN / y_MN.norm().clamp(min=_LEAST_NORM)  # no singular value is above 1 now
    for _ in range(_NUM_ITERATIONS):
        gram_MM = y_MN @ y_MN.T
        y_MN = torch.addmm(y_MN, torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c), y_MN, beta=a)
    return y_MN.T if is_tall else y_MN
