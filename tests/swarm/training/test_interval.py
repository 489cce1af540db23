from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from swarm.training.inner import IntervalResult
from swarm.training.interval import Intervals
from swarm_protocol import limits
from swarm_protocol.errors import RoundError
from torch import Tensor

THETA_N = torch.zeros(3)


class Trained:
    """An inner loop that ends with these numbers."""

    def __init__(self, mean_loss: float, theta_N: Tensor) -> None:
        self._mean_loss, self._theta_N = mean_loss, theta_N

    def load(self, theta_N: Tensor) -> None:
        assert theta_N is THETA_N

    def train(
        self, sample_ids: Sequence[int], num_steps: int, stop: Callable[[], bool] = lambda: False
    ) -> IntervalResult:
        return IntervalResult(num_steps=num_steps, num_samples=1, num_tokens=1, mean_loss=self._mean_loss, seconds=1.0)

    def flat(self) -> Tensor:
        return self._theta_N

    def validate(self, theta_N: Tensor, num_batches: int) -> float:
        return self._mean_loss


async def _train(mean_loss: float, theta_N: Tensor) -> tuple[IntervalResult, Tensor]:
    intervals = Intervals(Trained(mean_loss, theta_N))
    try:
        return await intervals.train(THETA_N, [1], 2)
    finally:
        await asyncio.to_thread(intervals.close)


def test_train_returns_the_way_from_the_start() -> None:
    result, delta_N = asyncio.run(_train(2.0, torch.ones(3)))
    assert result.mean_loss == 2.0
    assert delta_N.tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("mean_loss", "theta_N"),
    [
        (2 * limits.MAX_LOSS, THETA_N),
        (math.nan, THETA_N),
        (-math.inf, THETA_N),
        (1.0, torch.tensor([0.0, math.nan, 0.0])),
    ],
    ids=["loss no message can carry", "loss not a number", "loss infinite", "parameter not a number"],
)
def test_train_that_diverged_is_refused_with_the_remedy(mean_loss: float, theta_N: Tensor) -> None:
    with pytest.raises(RoundError, match="training diverged") as caught:
        asyncio.run(_train(mean_loss, theta_N))
    assert "learning_rate" in caught.value.remedy
