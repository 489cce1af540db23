"""Tests the interval loop without rounds: what an interval contributes when it is hurried, asked for again, or
overtaken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.replica_states import with_head
from support.training_swarm import SyntheticInner, config, setup_of
from swarm.network.interface import no_failpoints
from swarm.testing import virtual_time
from swarm.training.inner.interval import Intervals
from swarm.training.member.interval_loop import IntervalLoop
from swarm.training.run.run_config import RunConfig
from swarm.training.state.lease import LeaseStripe
from swarm.training.state.replica import Replica
from swarm.training.state.replica_state import ReplicaState
from swarm.training.trainer_events import IntervalDone, IntervalFailed, TrainingEvent
from swarm_protocol.errors import RoundError
from swarm_protocol.identity import Identity

ME = Identity(b"m" * 32).peer_id
STEP_S = 1.0


class World:
    """Run the interval loop of a run whose outer steps the test commits."""

    def __init__(self, run: RunConfig, inner: SyntheticInner, tasks: asyncio.TaskGroup) -> None:
        self.events: list[TrainingEvent] = []
        setup = setup_of(inner, run.fragments)
        state = ReplicaState.initial(setup.theta_N, run.overlap_steps)
        stripes = tuple(LeaseStripe(roster=(ME,)) for _ in state.manifest.stripes)
        self.replica = Replica(run, with_head(state, stripes=stripes, roster=(ME,)), bounds=setup.bounds)
        self.intervals = Intervals(inner, clock=inner.clock)
        context: Any = SimpleNamespace(
            replica=self.replica, network=SimpleNamespace(peer_id=ME), failpoints=no_failpoints
        )
        audits: Any = SimpleNamespace(next=lambda: None)
        effects: Any = SimpleNamespace(of=lambda _digest: ())
        self.loop = IntervalLoop(
            context, self.intervals, tasks=tasks, on_event=self.events.append, audits=audits, effects=effects
        )
        self.loop.begin()

    def commit(self, *, num_steps: int = 1, fetched: bool = False) -> None:
        """Pretend that `num_steps` outer steps were taken, or, with 0, that a round only admitted members."""
        state = self.replica.current
        self.replica.current = with_head(state, outer_step=state.outer_step + num_steps)
        self.loop.adopted(fetched=fetched)


def in_world(run: RunConfig, inner: SyntheticInner, use: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(run, inner, tasks)
            try:
                await use(world)
            finally:
                world.loop.end()
        await asyncio.to_thread(world.intervals.close)

    virtual_time.run(main())


def test_hurried_interval_is_completed_after_a_round_that_only_admits() -> None:
    async def use(world: World) -> None:
        world.loop.hurry(1)
        hurried = await world.loop.offer(1)
        assert hurried.contribution.num_samples == 2  # one step
        world.commit(num_steps=0)
        again = await world.loop.offer(1)
        assert again.contribution.num_samples == 2 * 5

    in_world(config(), SyntheticInner(virtual_step_s=STEP_S), use)


def test_offer_of_a_running_round_is_kept_when_the_next_interval_fails() -> None:
    inner = SyntheticInner(virtual_step_s=STEP_S)

    async def use(world: World) -> None:
        offer = await world.loop.offer(1)
        inner.diverges = True
        assert (await world.loop.offer(2)).delta_F is None
        assert [event.step for event in world.events if isinstance(event, IntervalFailed)] == [2]
        async with asyncio.timeout(1.0):
            assert await world.loop.offer(1) is offer
        inner.diverges = False
        world.commit()
        assert (await world.loop.offer(2)).delta_F is not None

    in_world(config(overlap_steps=2), inner, use)


def test_interval_starts_over_from_a_state_that_was_fetched_during_it() -> None:
    inner = SyntheticInner(virtual_step_s=STEP_S)

    async def use(world: World) -> None:
        await asyncio.sleep(2.5 * STEP_S)
        world.commit(num_steps=3, fetched=True)
        assert (await world.loop.offer(4)).contribution.num_samples == 2 * 5
        assert [event.step for event in world.events if isinstance(event, IntervalDone)] == [4]

    in_world(config(outer_steps=9), inner, use)


def test_member_whose_weights_cannot_be_loaded_sits_out_that_step_and_loads_the_next_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = SyntheticInner(virtual_step_s=STEP_S)

    def fails(_theta_N: object) -> None:
        monkeypatch.undo()
        raise RoundError("the worker processes do not start")

    monkeypatch.setattr(inner, "load", fails)

    async def use(world: World) -> None:
        assert (await world.loop.offer(1)).delta_F is None
        assert world.events == [IntervalFailed(step=1, reason="the worker processes do not start")]
        world.commit()
        assert (await world.loop.offer(2)).delta_F is not None

    in_world(config(), inner, use)
