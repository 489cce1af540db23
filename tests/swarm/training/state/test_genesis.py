"""Tests that nobody begins a run with other weights than those of the genesis that its author signed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from support.training_swarm import NUM_VALUES, Swarm, SyntheticInner, assert_equal_steps, config, setup_of
from swarm.testing import virtual_time
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import StartConfig
from swarm.training.state.lease import LeaseStripe
from swarm.training.state.replica_state import ReplicaState, check_genesis, genesis_digest
from swarm_protocol.errors import IntegrityError
from swarm_protocol.identity import Identity

ZEROS = torch.zeros(NUM_VALUES)
PEER = Identity(bytes(32)).peer_id


def pinned(**changes: object) -> RunConfig:
    run = config(**changes)
    return replace(run, start=StartConfig(genesis=genesis_digest(ZEROS, run)))


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_state_of_outer_step_0_is_compared_with_the_genesis_whoever_was_admitted(overlap_steps: int) -> None:
    run = pinned(overlap_steps=overlap_steps)
    first = ReplicaState.initial(ZEROS, overlap_steps).manifest
    admitted = replace(first, roster=(PEER,), stripes=(LeaseStripe(roster=(PEER,)),) * len(first.stripes))
    for manifest in (first, admitted):
        check_genesis(manifest, run)
    other = ReplicaState.initial(ZEROS + 1, overlap_steps).manifest
    for manifest in (other, replace(other, roster=(PEER,))):
        with pytest.raises(IntegrityError, match="other initial weights than the run's author signed"):
            check_genesis(manifest, run)
    check_genesis(other, replace(run, start=StartConfig()))
    check_genesis(replace(other, outer_step=1), run)


def test_member_stops_at_once_when_its_initial_weights_differ_from_the_genesis() -> None:
    async def main() -> None:
        async with Swarm(pinned(outer_steps=3)) as swarm:
            other = replace(setup_of(SyntheticInner(), 1), theta_N=ZEROS + 1)
            wrong = await swarm.join("wrong", setup=other)
            assert wrong.task is not None
            with pytest.raises(IntegrityError, match="other initial weights"):
                await wrong.task
            wrong.task = None
            right = await swarm.join("right")
            assert_equal_steps(await swarm.finish("right"), 3)
            assert right.trainer.state is not None

    virtual_time.run(main())


def test_newcomer_refuses_an_initial_state_with_other_weights() -> None:
    """Its senders train the run with a file whose genesis they have removed, and admit each other before the
    newcomer."""

    async def main() -> None:
        async with Swarm(pinned(min_group=2, outer_steps=3)) as swarm:
            honest = swarm.run
            swarm.run = replace(honest, config=replace(honest.config, start=StartConfig()))
            object.__setattr__(swarm.run, "run_id", honest.run_id)
            for name in ("f0", "f1"):
                # they never finish an interval, so that the run stays at the state that admitted them
                inner = SyntheticInner(virtual_step_s=1e6)
                await swarm.join(name, inner=inner, setup=replace(setup_of(inner, 1), theta_N=ZEROS + 1))
            while not all(member.trainer.certificate for member in swarm.members.values()):
                await asyncio.sleep(0.05)
            swarm.run = honest
            newcomer = await swarm.join("newcomer")
            await asyncio.sleep(30.0)
            assert newcomer.trainer.state is not None
            assert bool((newcomer.trainer.state.theta_N == 0).all())
            reasons = [each.reason for each in newcomer.events if hasattr(each, "reason")]
            assert any("other initial weights" in reason for reason in reasons), reasons
            for member in swarm.members.values():
                member.trainer.stop()

    virtual_time.run(main())
