"""Tests runs in which pairs of members can never reach each other, and reach all others."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from support.training_swarm import LAN, Swarm, SyntheticInner, assert_equal_steps, config, identity_of, interval_cost
from swarm.network.memory.memory_network import MemoryInternet
from swarm.testing import virtual_time
from swarm.training.trainer_events import RoundAborted

NUM_STEPS = 5


class CutInternet(MemoryInternet):
    """An internet without a route between the two peers of each of `pairs`."""

    pairs: frozenset[frozenset[str]] = frozenset()

    def _separated(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self.pairs or super()._separated(a, b)


@pytest.mark.parametrize(("num_members", "num_pairs", "num_failed"), [(6, 1, 3), (9, 3, 4)])
def test_cut_pairs_of_up_to_a_third_of_the_members_cost_a_few_attempts_in_each_step(
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
