"""Tests a proven member that returns to a run of whole trainers after some steps."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.training_swarm import Member, Swarm, assert_equal_steps, config, interval_cost
from swarm.testing import virtual_time
from swarm.training.state.certificate import RunSignatures
from swarm.training.trainer_events import OnProbation, OuterStep
from swarm_protocol.identity import Identity

NUM_STEPS, NUM_AWAY = 14, 3


async def _until_step(member: Member, step: int) -> None:
    while not any(event.step >= step for event in member.of(OuterStep)):
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("absence_steps", [0, 100])
def test_returning_member_decides_and_counts_fully_only_when_the_run_remembers_it(
    absence_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="swarm")
    run = config(min_group=2, outer_steps=NUM_STEPS, absence_steps=absence_steps)

    async def main() -> None:
        async with Swarm(run) as swarm:
            stays, _, goes = [await swarm.join(name) for name in ("m0", "m1", "m2")]
            await _until_step(stays, 6)
            assert goes.trainer.state is not None
            swarm.kill("m2")
            await _until_step(stays, goes.trainer.state.outer_step + NUM_AWAY)
            assert stays.trainer.state is not None
            assert goes.peer_id not in stays.trainer.state.manifest.roster
            back = await swarm.join("m2")
            await _until_step(back, 1)
            proof = RunSignatures.of_run(swarm.run, Identity(bytes(32)), "test").check_certificate(
                back.trainer.certificate, back.network.now()
            )
            left = [event.steps_left for event in back.of(OnProbation)]
            if absence_steps:
                assert not left
                assert back.peer_id in proof.roster
                assert not proof.origin.on_probation
            else:
                assert left[:1] == [4], "a member that nobody remembers is on full probation again"
                assert back.peer_id not in proof.roster
            assert_equal_steps(await swarm.finish(), NUM_STEPS)

    virtual_time.run(main(), compute_s=interval_cost)
