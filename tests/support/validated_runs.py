"""Simulated runs whose members validate each other's intervals, and members that lie in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.training_swarm import AUTHOR, AlteredMember, Member, Swarm, SyntheticInner, config
from swarm.training.evidence.interval_audits import Validation
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.member.interval_loop import IntervalLoop
from swarm.training.member.outer_steps import OuterSteps
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember
from swarm.training.round.round_events import Action, CastVote
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import InnerConfig
from swarm.training.run.signed_run import SignedRun, sign_mapping, to_mapping
from swarm.training.state.replica_state import ReplicaState
from swarm.training.state.run_context import RunContext
from torch import Tensor

NUM_VALUES = 3000
HONEST = ("m0", "m1", "m2", "m3")

Change = Callable[[Tensor, Tensor], Tensor]
"""Takes the weights at an interval's start and end, and returns those that a member says it has reached."""


def validated(**changes: object) -> RunConfig:
    settings: dict[str, object] = {
        "min_group": 2,
        "outer_steps": 8,
        "validation_rate": 0.5,
        "inner": InnerConfig(batch_windows=2, fresh_moments=True),
    }
    return config(**{**settings, **changes})


def run_of(settings: RunConfig) -> SignedRun:
    """Return a run of which there is a file."""
    return sign_mapping(settings, to_mapping(settings), AUTHOR, 1_750_000_000)


@dataclass
class ChangedInner(SyntheticInner):
    """Says that it has reached other weights than it has."""

    num_values: int = NUM_VALUES
    virtual_step_s: float = 0.5
    change: Change = lambda _, end_N: end_N

    def __post_init__(self) -> None:
        super().__post_init__()
        self.start_N = self.theta_N

    def train(self, *arguments: Any, **options: Any) -> IntervalResult:
        self.start_N = self.theta_N
        return super().train(*arguments, **options)

    def flat(self, where: slice = slice(None)) -> Tensor:
        return self.change(self.start_N, self.theta_N)[where].clone()


def noise(start_N: Tensor, end_N: Tensor) -> Tensor:
    drawn_N = torch.randn(start_N.shape, generator=torch.Generator().manual_seed(1))
    return start_N + drawn_N * (end_N - start_N).norm() / drawn_N.norm()


def rounded(start_N: Tensor, end_N: Tensor) -> Tensor:
    """Return what another device could get."""
    return end_N + 0.1 * (noise(start_N, end_N) - start_N)


LIES: dict[str, Change] = {
    "turned round": lambda start_N, end_N: 2 * start_N - end_N,
    "ten times as far": lambda start_N, end_N: start_N + 10 * (end_N - start_N),
    "nothing trained": lambda start_N, _: start_N,
    "noise": noise,
}


class Idle(RunMember):
    """Validates nobody."""

    async def _open(self) -> OuterSteps:
        steps = await super()._open()
        steps._audits.next = lambda: None  # type: ignore[method-assign]
        return steps


class Slanderer(RunMember):
    """Finds every interval wrong that it is to validate."""

    async def _open(self) -> OuterSteps:
        steps = await super()._open()
        audits = steps._audits

        async def slander(due: Validation) -> None:
            await audits._tell(due.case)

        audits.run = slander  # type: ignore[method-assign]
        return steps


class LateVoter(AlteredMember):
    """Votes after all others. An outsider believes an accusation only where the accused's own vote is in the
    certificate, which has no more votes than it needs: so this member's is the one that is not there."""

    async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
        act = driver._act

        async def act_late(action: Action) -> None:
            if isinstance(action, CastVote):
                await asyncio.sleep(0.5)
            await act(action)

        driver._act = act_late  # type: ignore[method-assign]
        return await super()._drive(driver, context)


STATES: dict[bytes, ReplicaState] = {}


class Keeping(AlteredMember):
    """Keeps all states that it had, by digest, in STATES."""

    async def _take_step(self, intervals: IntervalLoop, background: asyncio.TaskGroup) -> bool:
        assert self.replica is not None
        STATES[self.replica.digest] = self.replica.current
        return await super()._take_step(intervals, background)


KINDS: dict[str, type[RunMember]] = {HONEST[0]: Keeping, HONEST[-1]: LateVoter}
"""The kinds of the honest members; others are RunMembers."""


async def run_with_liar(change: Change, kind: type[RunMember] = Idle, **changes: object) -> tuple[list[Member], Member]:
    """Run four honest members with one whose contributions are changed."""
    async with Swarm(validated(**changes)) as swarm:
        swarm.run = run_of(swarm.run.config)
        for name in HONEST:
            await swarm.join(name, inner=ChangedInner(), kind=KINDS.get(name, RunMember))
        liar = await swarm.join("liar", inner=ChangedInner(change=change), kind=kind)
        return await swarm.finish(*HONEST), liar
