"""When the committed state is measured on held-out data, and what is told of a measurement that is no number."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from support.training_swarm import config
from swarm.training.inner.interval import Validating
from swarm.training.member.trainer_events import Validated
from swarm.training.state.replica_state import ReplicaState
from swarm_protocol import limits
from swarm_protocol.records import ValidationReport
from torch import Tensor

RUN = config(outer_steps=6, validation_interval=2)


class Intervals:
    def __init__(self, loss: float) -> None:
        self._loss = loss

    def validated(self, _theta_N: Tensor, _num_batches: int) -> asyncio.Future[float]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(self._loss)
        return done


def state(outer_step: int) -> ReplicaState:
    return replace(ReplicaState.initial(torch.zeros(2)), outer_step=outer_step)


def test_state_is_measured_every_interval_and_the_last_one_only_at_the_end() -> None:
    async def main() -> list[int]:
        told: list[Validated] = []
        validating = Validating(RUN, cast("Any", Intervals(1.5)), told.append)
        async with asyncio.TaskGroup() as tasks:
            for step in range(1, RUN.outer_steps + 1):
                validating.soon(state(step), tasks)
        await validating.now(state(RUN.outer_steps))
        return [each.step for each in told]

    assert asyncio.run(main()) == [2, 4, 6]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2 * limits.MAX_LOSS])
def test_loss_that_is_no_number_is_told_here_and_is_in_no_record(loss: float) -> None:
    async def main() -> tuple[int, ValidationReport | None]:
        told: list[Validated] = []
        validating = Validating(RUN, cast("Any", Intervals(loss)), told.append)
        await validating.now(state(2))
        return len(told), validating.newest

    assert asyncio.run(main()) == (1, None)
