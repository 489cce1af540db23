"""Tests error feedback in rounds: the codec's residual is added to the next contribution, and nothing is added
twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training_swarm import (
    NUM_VALUES,
    AlteredMember,
    Member,
    SpoiledCodec,
    Swarm,
    SyntheticInner,
    assert_equal_steps,
    config,
)
from swarm.testing import virtual_time
from swarm.training.allreduce.parts import Residuals
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import OuterStep, RoundAborted
from swarm_compression import get_codec
from swarm_compression.feedback import ErrorFeedback
from torch import Tensor

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NUM_STEPS = 6


class Recorder(AlteredMember):
    """Keep the contribution to each step."""

    round_context: RunContext
    offered: dict[int, Tensor]

    async def _open_context(self) -> RunContext:
        self.round_context, self.offered = await super()._open_context(), {}
        return self.round_context

    async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
        recording = asyncio.create_task(self._record(driver.setup.step))
        certificate = await super()._drive(driver, context)
        recording.cancel()
        return certificate

    async def _record(self, step: int) -> None:
        assert self._steps is not None
        assert self._steps.interval_loop is not None
        delta_F = (await self._steps.interval_loop.offer(step)).delta_F
        if delta_F is not None:
            self.offered[step] = delta_F.clone()


class LateLiar(RunMember):
    """Send slices that are too short from step 3 on."""

    async def _open_context(self) -> RunContext:
        context = await super()._open_context()
        is_late = lambda: context.replica.outer_step >= 2  # noqa: E731
        return replace(context, codec=SpoiledCodec(lambda data: data[:-1] if is_late() else data), residuals=None)


@pytest.mark.parametrize("fragments", [1, 2])
def test_residual_follows_from_committed_contributions_when_attempts_fail(fragments: int) -> None:
    async def main() -> None:
        run = config(min_group=3, outer_steps=NUM_STEPS, error_feedback=True, fragments=fragments)
        async with Swarm(run) as swarm:
            honest = [await swarm.join(f"m{index}", kind=Recorder) for index in range(3)]
            await swarm.join("liar", kind=LateLiar)
            members = await swarm.finish("m0", "m1", "m2")
            assert_equal_steps(members, NUM_STEPS)
            assert any(event.step == 3 for member in honest for event in member.of(RoundAborted))
            for member in honest:
                assert_residuals(member, fragments)

    virtual_time.run(main())


def assert_residuals(member: Member, fragments: int) -> None:
    trainer = member.trainer
    assert isinstance(trainer, Recorder)
    assert trainer.round_context.residuals is not None
    for index in range(fragments):
        fragment = trainer.round_context.replica.fragment(index + 1)
        expected = ErrorFeedback(get_codec("int8"), fragment.stop - fragment.start)
        steps = [event.step for event in member.of(OuterStep) if (event.step - 1) % fragments == index]
        assert len(steps) == NUM_STEPS // fragments
        for step in steps:
            expected.encode(trainer.offered[step])
            expected.commit()
        assert expected._residual_N.any()
        assert torch.equal(trainer.round_context.residuals.of(fragment)._residual_N, expected._residual_N)


def test_settle_allocates_nothing_when_the_fragment_has_no_contributions() -> None:
    residuals = Residuals(get_codec("int8"))
    residuals.settle(slice(0, 10), is_committed=True)
    residuals.settle(slice(0, 10), is_committed=False)
    assert not residuals._feedbacks


@pytest.mark.parametrize("is_committed", [True, False])
def test_settle_keeps_what_the_codec_lost_only_of_a_committed_contribution(is_committed: bool) -> None:
    residuals, fragment = Residuals(get_codec("int8")), slice(0, 100)
    residuals.of(fragment).encode(torch.linspace(-1.0, 1.0, 100))
    residuals.settle(fragment, is_committed=is_committed)
    assert bool(residuals.of(fragment)._residual_N.any()) is is_committed


class Uneven(SyntheticInner):
    """Move a few values of each block far and the others little, so that a coarse codec resolves only the large
    ones."""

    def train(self, sample_ids: Sequence[int], num_steps: int, *arguments: Any, **options: Any) -> IntervalResult:
        result = super().train(sample_ids, num_steps, *arguments, **options)
        large_N = self.theta_N[::64]
        large_N += 3.0 * torch.randn(len(large_N), generator=torch.Generator().manual_seed(sample_ids[0]))
        return result


def distance(codec: str, *, error_feedback: bool) -> float:
    """Return the root mean square distance of the small values from the target at the end of the run."""

    async def main() -> float:
        run: Any = config(min_group=2, outer_steps=12, codec=codec, error_feedback=error_feedback)
        async with Swarm(run) as swarm:
            members = [await swarm.join(f"m{index}", inner=Uneven()) for index in range(2)]
            assert_equal_steps(await swarm.finish(), 12)
            state = members[0].trainer.state
            assert state is not None
            small = torch.arange(NUM_VALUES) % 64 != 0
            return float((state.theta_N - members[0].inner.target_N)[small].square().mean().sqrt())

    return virtual_time.run(main())


@pytest.mark.parametrize("codec", ["int4", "e3m0"])
def test_run_with_a_coarse_codec_ends_nearer_to_the_target_when_error_feedback_is_on(codec: str) -> None:
    without, with_it = distance(codec, error_feedback=False), distance(codec, error_feedback=True)
    assert with_it < 0.5 * without
