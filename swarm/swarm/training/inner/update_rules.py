"""The rules by which an inner step moves parameters, each with the moments that it keeps of them: AdamW and Muon.

AdamW, which most runs use, is called as a function: the first of torch's optimizer objects imports its compiler, which
takes as long as importing torch, and 70 MB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from swarm.training.run.run_tables import InnerConfig

_EPSILON = 1e-8
"""AdamW adds it to the root of the second moment, as torch's does."""


class UpdateRule(ABC):
    """Updates `parameters` from their gradients. `moments` has a tensor for each of them by the moment's name, and
    nothing before the first step."""

    moment_names: ClassVar[tuple[str, ...]]

    def __init__(self, config: InnerConfig, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.moments: Mapping[str, Sequence[Tensor]] = {}
        self._config = config

    def begin(self, _num_steps: int, moments: Mapping[str, Sequence[Tensor]]) -> None:
        """Go on with these `moments`, which are those after `_num_steps`."""
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
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), torch's, of matrices. The learning rate is
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
