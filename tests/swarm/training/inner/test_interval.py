"""Tests one member's intervals, when the committed state is measured on held-out data, and what happens when a loss is
not finite."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import pytest
import torch
from support.replica_states import state_of
from support.training_swarm import config
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.inner.interval import HeldOutLoss, Intervals
from swarm.training.state.replica_state import ReplicaState
from swarm_protocol import limits
from swarm_protocol.errors import RoundError
from swarm_protocol.records import ValidationReport
from torch import Tensor

T = TypeVar("T")

THETA_N = torch.zeros(3)


class Trained:
    """End each stretch with the given numbers, after one step for every second of its clock."""

    def __init__(self, mean_loss: float, theta_N: Tensor) -> None:
        self.mean_loss, self.now_s = mean_loss, 0.0
        self.asked: list[tuple[list[int], int, int]] = []
        self._theta_N = theta_N

    def load(self, theta_N: Tensor) -> None:
        raise AssertionError

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None:
        self._theta_N[where] = mixing * self._theta_N[where] + (1 - mixing) * theta_F

    def train(
        self,
        sample_ids: Sequence[int],
        num_steps: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        done_steps: int = 0,
    ) -> IntervalResult:
        self.asked.append((list(sample_ids), num_steps, done_steps))
        done = 0
        while done < num_steps and not stop():
            done, self.now_s = done + 1, self.now_s + 1.0
        return IntervalResult(
            num_steps=done, num_samples=2 * done, num_tokens=8 * done, mean_loss=self.mean_loss, seconds=float(done)
        )

    def flat(self, where: slice = slice(None)) -> Tensor:
        return self._theta_N[where]

    def held_out_loss(self, theta_N: Tensor, num_windows: int, draw: int = 0) -> float:
        return self.mean_loss

    def close(self) -> None:
        pass


def in_intervals(inner: Trained, use: Callable[[Intervals], Awaitable[T]], max_interval_s: float = math.inf) -> T:
    async def main() -> T:
        intervals = Intervals(inner, max_interval_s=max_interval_s, clock=lambda: inner.now_s)
        try:
            return await use(intervals)
        finally:
            await asyncio.to_thread(intervals.close)

    return asyncio.run(main())


def test_delta_is_the_fragments_start_minus_its_current_values() -> None:
    async def use(intervals: Intervals) -> Tensor:
        return await intervals.begin().delta(THETA_N[1:], slice(1, 3))

    assert in_intervals(Trained(2.0, torch.tensor([1.0, 2.0, 3.0])), use).tolist() == [-2.0, -3.0]


def test_train_counts_two_stretches_as_one_interval() -> None:
    inner = Trained(2.0, THETA_N)

    async def use(intervals: Intervals) -> IntervalResult:
        interval = intervals.begin(100)
        await interval.train([0, 1, 2, 3, 4, 5], 1)
        inner.mean_loss = 1.0
        await interval.train([0, 1, 2, 3, 4, 5], 3)
        await interval.train([0, 1, 2, 3, 4, 5], 3)
        return interval.done

    assert in_intervals(inner, use) == IntervalResult(
        num_steps=3, num_samples=6, num_tokens=24, mean_loss=pytest.approx(4 / 3), seconds=3.0
    )
    assert inner.asked == [([0, 1, 2, 3, 4, 5], 1, 100), ([2, 3, 4, 5], 2, 101)]


def test_train_ends_with_the_steps_done_when_the_intervals_time_is_over() -> None:
    inner = Trained(2.0, THETA_N)

    async def use(intervals: Intervals) -> int:
        interval = intervals.begin()
        await interval.train(range(100), 2)
        inner.now_s += 2.0  # the time between stretches counts, too
        await interval.train(range(100), 50)
        return interval.done.num_steps

    assert in_intervals(inner, use, max_interval_s=6.5) == 5


@pytest.mark.parametrize(("end", "num_steps"), [(Intervals.hurry, 1), (Intervals.stop, 0)])
def test_hurry_and_stop_end_the_current_interval_but_not_the_next_one(
    end: Callable[[Intervals], None], num_steps: int
) -> None:
    """One that was hurried before its first step takes it."""

    async def use(intervals: Intervals) -> tuple[int, int]:
        first = intervals.begin()
        end(intervals)
        await first.train(range(8), 4)
        second = intervals.begin()
        await second.train(range(8), 4)
        await first.train(range(8), 4)
        return first.done.num_steps, second.done.num_steps

    assert in_intervals(Trained(2.0, THETA_N), use) == (num_steps, 4)


@pytest.mark.parametrize("mean_loss", [2 * limits.MAX_LOSS, math.nan, -math.inf])
def test_train_refuses_a_loss_that_no_message_can_carry_and_names_a_remedy(mean_loss: float) -> None:
    async def use(intervals: Intervals) -> None:
        await intervals.begin().train([1, 2], 1)

    with pytest.raises(RoundError, match="training diverged") as caught:
        in_intervals(Trained(mean_loss, THETA_N), use)
    assert "learning_rate" in caught.value.remedy


def test_delta_is_refused_when_a_parameter_is_not_a_number() -> None:
    async def use(intervals: Intervals) -> Tensor:
        return await intervals.begin().delta(THETA_N, slice(0, 3))

    with pytest.raises(RoundError, match="a parameter is not finite"):
        in_intervals(Trained(1.0, torch.tensor([0.0, math.nan, 0.0])), use)


RUN = config(outer_steps=6, validation_interval=2)


class FixedLoss:
    def __init__(self, loss: float | Exception) -> None:
        self._loss = loss

    def held_out_loss(self, _theta_N: Tensor) -> asyncio.Future[float]:
        done = asyncio.get_running_loop().create_future()
        if isinstance(self._loss, Exception):
            done.set_exception(self._loss)
        else:
            done.set_result(self._loss)
        return done


def state(outer_step: int) -> ReplicaState:
    return state_of(torch.zeros(2), outer_step=outer_step)


def test_state_is_measured_at_every_validation_interval_and_the_last_one_at_the_end() -> None:
    async def main() -> list[int]:
        told: list[tuple[int, float]] = []
        validating = HeldOutLoss(RUN, cast("Any", FixedLoss(1.5)), lambda *each: told.append(each))
        async with asyncio.TaskGroup() as tasks:
            for step in range(1, RUN.outer_steps + 1):
                validating.soon(state(step), tasks)
        await validating.now(state(RUN.outer_steps))
        return [step for step, _ in told]

    assert asyncio.run(main()) == [2, 4, 6]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2 * limits.MAX_LOSS])
def test_loss_that_is_not_finite_is_an_event_here_and_in_no_record(loss: float) -> None:
    async def main() -> tuple[int, ValidationReport | None]:
        told: list[tuple[int, float]] = []
        validating = HeldOutLoss(RUN, cast("Any", FixedLoss(loss)), lambda *each: told.append(each))
        await validating.now(state(2))
        return len(told), validating.newest

    assert asyncio.run(main()) == (1, None)


@pytest.mark.parametrize(
    "failure", [RoundError("the worker processes have ended"), torch.OutOfMemoryError("no memory")]
)
def test_run_ends_normally_when_the_last_loss_cannot_be_measured(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, a worker process of several devices may have died in the last interval."""

    async def main() -> ValidationReport | None:
        validating = HeldOutLoss(RUN, cast("Any", FixedLoss(failure)), lambda *_: None)
        await validating.now(state(RUN.outer_steps))
        return validating.newest

    assert asyncio.run(main()) is None
    assert f"outer step 6 could not be measured: {failure}" in caplog.text
