"""Tests what a member measures of drawn contributions, and that it trains on when its device cannot measure."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.training_swarm import config
from swarm.training.evidence.wrong_interval import IntervalStart
from swarm.training.member.held_out_effects import DrawnSlices, HeldOutEffects
from swarm_protocol.errors import RoundError
from torch import Tensor

DIGEST = b"d" * 32


class SummingInner:
    """Return the sum of the weights as the loss, or fail with `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def held_out_loss(self, theta_N: Tensor, num_windows: int, draw: int) -> float:
        if self._error is not None:
            raise self._error
        return float(theta_N.sum())

    def off_loop(self, function: Any, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def measured(inner: SummingInner) -> HeldOutEffects:
    """Return the effects after a step in which the member holds one slice of half of the vector."""
    replica = SimpleNamespace(
        current=SimpleNamespace(manifest=SimpleNamespace(drawn=("me", "other"))),
        config=config(),
        outer_step=1,
        digest=DIGEST,
        fragment=lambda _: slice(0, 4),
    )
    context = SimpleNamespace(replica=replica, network=SimpleNamespace(peer_id="me"))
    intervals = SimpleNamespace(inner=inner, off_loop=inner.off_loop)

    async def main() -> HeldOutEffects:
        effects = HeldOutEffects(cast(Any, context), cast(Any, intervals))
        held = DrawnSlices(where=slice(2, 4), slices={"other": torch.tensor([1e-3, 0.0])})
        async with asyncio.TaskGroup() as tasks:
            effects.measure_soon(IntervalStart(step=1, theta_N=torch.zeros(4), stripes=()), held, tasks)
        return effects

    return asyncio.run(main())


def test_effect_is_the_fall_of_the_loss_scaled_to_the_whole_vector() -> None:
    step = config().outer.learning_rate
    effects = measured(SummingInner())
    assert effects.of(DIGEST) == (0, pytest.approx(2 * step * 1e-3 * 1e6, abs=1.0)), (
        "a member measures no effect of its own contribution"
    )
    assert effects.of(bytes(32)) == ()


@pytest.mark.parametrize("error", [RoundError("no"), torch.OutOfMemoryError("no memory")], ids=["fails", "no memory"])
def test_member_reports_no_effects_and_continues_when_its_device_cannot_measure(error: Exception) -> None:
    assert measured(SummingInner(error)).of(DIGEST) == ()
