"""Tests runs in which pairs of members can never reach each other, and reach all others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest
from support.training_swarm import (
    LAN,
    AlteredMember,
    Swarm,
    SyntheticInner,
    assert_equal_steps,
    config,
    identity_of,
    interval_cost,
)
from swarm.network.memory.memory_network import MemoryInternet
from swarm.testing import virtual_time
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember
from swarm.training.round.round_events import LeftOut
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import OuterStep, RoundAborted
from swarm_protocol.identity import Identity

NUM_STEPS = 3


class CutInternet(MemoryInternet):
    """An internet without a route between the two peers of each of `pairs`."""

    pairs: frozenset[frozenset[str]] = frozenset()

    def _separated(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self.pairs or super()._separated(a, b)


@pytest.mark.parametrize(("num_members", "num_pairs", "num_failed"), [(6, 1, 3), (9, 3, 4), (9, 4, 5)])
def test_cut_pairs_cost_a_few_attempts_in_each_step(
    num_members: int, num_pairs: int, num_failed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="swarm")

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            names = [f"m{index}" for index in range(num_members)]
            peers = [identity_of(name).peer_id for name in names]
            internet = CutInternet(default_link=LAN, detection_s=0.2, seed=0)
            internet.pairs = frozenset(frozenset(peers[2 * index : 2 * index + 2]) for index in range(num_pairs))
            swarm.internet = internet
            for name in names:
                # rounds take long enough for the cut to matter
                await swarm.join(name, inner=SyntheticInner(num_values=40_000))
            members = await swarm.finish()
            assert_equal_steps(members, NUM_STEPS)
            failed = Counter(event.step for event in members[-1].of(RoundAborted))
            assert failed
            assert max(failed.values()) <= num_failed

    virtual_time.run(main(), compute_s=interval_cost)


class Refusing(AlteredMember):
    """A member that never yields."""

    async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
        feed = driver.feed
        driver.feed = lambda event: None if isinstance(event, LeftOut) else feed(event)  # type: ignore[method-assign]
        return await super()._drive(driver, context)


class RefusedInternet(MemoryInternet):
    """An internet on which `liar` refuses one other of `honest` every 0.7 seconds."""

    liar = ""
    honest: tuple[str, ...] = ()

    def _separated(self, a: str, b: str) -> bool:
        refused = self.honest[int(asyncio.get_running_loop().time() / 0.7) % len(self.honest)]
        return {a, b} == {self.liar, refused} or super()._separated(a, b)


def test_liar_that_refuses_one_member_after_another_keeps_at_most_one_out_of_each_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, logger="swarm")

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            liar, *honest = names = [f"m{index}" for index in range(9)]
            swarm.internet = internet = RefusedInternet(default_link=LAN, detection_s=0.2, seed=0)
            internet.liar, *others = (identity_of(name).peer_id for name in names)
            internet.honest = tuple(others)
            for name in names:
                kind = Refusing if name == liar else RunMember
                await swarm.join(name, inner=SyntheticInner(num_values=40_000), kind=kind)
            members = await swarm.finish(*honest)
            assert_equal_steps(members, NUM_STEPS)
            assert any(member.of(RoundAborted) for member in members)
            groups = {event.step: set(event.group) for member in members for event in member.of(OuterStep)}
            assert all(len(group & {*others}) >= len(others) - 1 for group in groups.values())
            for member in members:
                proof = RunSignatures.of_run(swarm.run, Identity(bytes(32)), "test").check_certificate(
                    member.trainer.certificate, member.network.now()
                )
                contributors = {each.peer_id for each in proof.origin.contributors}
                assert len(contributors & {*others}) >= len(others) - 1

    virtual_time.run(main(), compute_s=interval_cost)
