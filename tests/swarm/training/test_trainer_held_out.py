"""Tests scores of contributions on held-out data in whole runs: of honest work, of noise, and of work that undoes the
others'."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn

import pytest
from support.training_swarm import AlteredMember, Member, Swarm, assert_equal_steps, config
from support.validated_runs import LIES, ChangedInner
from swarm.testing import virtual_time
from swarm.training.allreduce.audit import Auditing
from swarm.training.member.held_out_effects import DrawnSlices
from swarm.training.member.outer_steps import OuterSteps
from swarm.training.member.reductions import Reductions
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import InnerConfig
from swarm.training.standing.held_out_scores import LEAST_MEASURED, MICRO
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import HeldOutScored
from swarm_protocol import limits
from swarm_protocol.errors import RoundError
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Group

pytestmark = pytest.mark.usefixtures("only_errors_logged")

HONEST = ("m0", "m1", "m2", "m3")
INNER = InnerConfig(batch_windows=2, fresh_moments=True)
NUM_STEPS = 6
NUM_DISCOUNTED_STEPS = 8
"""A low score counts only after some measurements, so that its effects need a few more steps."""


class Slanderer(RunMember):
    """Report the worst effect for all contributions of others."""

    async def _open(self) -> OuterSteps:
        steps = await super()._open()
        effects = steps._effects
        measured = effects.of
        effects.of = lambda digest: (-limits.MAX_EFFECT,) * len(measured(digest))  # type: ignore[method-assign]
        return steps


def run_of(**changes: object) -> RunConfig:
    settings: dict[str, object] = {"min_group": 5, "outer_steps": NUM_STEPS, "held_out_scores": limits.MAX_SCORED}
    return config(**{**settings, **changes})


async def joined(swarm: Swarm, **liars: str) -> None:
    for name in HONEST:
        await swarm.join(name, inner=ChangedInner())
    for name, lie in liars.items():
        await swarm.join(name, inner=ChangedInner(change=LIES[lie]))


def scores(member: Member) -> dict[str, float]:
    assert member.trainer.state is not None
    return {each.peer_id: each.value / MICRO for each in member.trainer.state.manifest.held_out}


def test_scores_separate_honest_work_from_noise_and_from_reversed_work() -> None:
    async def main() -> None:
        async with Swarm(run_of()) as swarm:
            await joined(swarm, noise="noise", flipped="turned round")
            members = await swarm.finish()
            assert_equal_steps(members, NUM_STEPS)
            found = scores(members[0])
            assert all(scores(member) == found for member in members), "scores are part of the state and must be equal"
            honest = [found[swarm.members[name].peer_id] for name in HONEST]
            noise, flipped = found[swarm.members["noise"].peer_id], found[swarm.members["flipped"].peer_id]
            assert min(honest) > 0
            assert flipped < noise < min(honest) / 4, "noise must score near zero, and reversed work below it"
            assert flipped < 0
            for member in members:
                event = member.of(HeldOutScored)[-1]
                assert (event.step, event.scores) == (NUM_STEPS, pytest.approx(found))

    virtual_time.run(main())


def test_contributions_are_measured_where_the_slices_for_a_validation_do_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_drawn, asked, measures = Reductions.keep_drawn, set[str](), list[bool]()

    async def missing(self: Auditing, member: str, leaves: Sequence[int]) -> NoReturn:
        asked.add(self._streams.me)
        raise RoundError(f"a slice of {member} is missing")

    async def noted(self: Reductions, proof: Proof) -> None:
        me = self._context.network.peer_id
        asked.discard(me)
        await keep_drawn(self, proof)
        if me in asked and proof.outer_step < NUM_STEPS:
            measures.append(self.measurable is not None)

    monkeypatch.setattr(Auditing, "slices_of", missing)
    monkeypatch.setattr(Reductions, "keep_drawn", noted)

    async def main() -> None:
        async with Swarm(run_of(min_group=4, validation_rate=0.5, inner=INNER)) as swarm:
            await joined(swarm)
            assert_equal_steps(await swarm.finish(), NUM_STEPS)
            assert measures
            assert all(measures)

    virtual_time.run(main())


def test_third_of_liars_moves_no_score_beyond_the_honest_reports() -> None:
    """Compare the same run with and without slander: no honest member's score leaves the honest range."""

    async def ends(kind: type[RunMember]) -> tuple[Sequence[float], float]:
        async with Swarm(run_of(min_group=6)) as swarm:
            await joined(swarm, flipped="turned round")
            await swarm.join("slanderer", inner=ChangedInner(), kind=kind)
            members = await swarm.finish()
            found = scores(members[0])
            return [found[swarm.members[name].peer_id] for name in HONEST], found[swarm.members["flipped"].peer_id]

    async def main() -> None:
        honest, flipped = await ends(RunMember)
        slandered, still_flipped = await ends(Slanderer)
        assert min(slandered) > 0.3 * min(honest)
        assert max(slandered) < 3 * max(honest)
        assert flipped < 0
        assert still_flipped < 0

    virtual_time.run(main())


def test_member_with_a_low_score_counts_for_a_tenth_when_the_run_discounts() -> None:
    async def final_loss(*, discounts: bool) -> float:
        """Return the loss at the end of a run with the mean and a member that undoes the others' work."""
        proofs, num_steps = dict[int, Proof](), NUM_DISCOUNTED_STEPS
        run = run_of(outer_steps=num_steps, discount_low_scores=discounts, aggregator="mean", fallback="")
        async with Swarm(run) as swarm:
            await joined(swarm, flipped="turned round")
            observed, flipped = swarm.members["m0"], swarm.members["flipped"].peer_id
            reader = RunSignatures.of_run(swarm.run, Identity(b"onlooker".ljust(32)), "test")
            while max(proofs, default=0) < num_steps:
                await asyncio.sleep(0.02)
                if observed.trainer.certificate:
                    proof = reader.check_certificate(observed.trainer.certificate, observed.network.now())
                    proofs[proof.outer_step] = proof
            assert_equal_steps(await swarm.finish(), num_steps)
        discounted = {
            step: {each.peer_id for each in proof.origin.members if each.discounted} for step, proof in proofs.items()
        }
        assert discounted[num_steps] == ({flipped} if discounts else set())
        assert not any(peers for step, peers in discounted.items() if step <= LEAST_MEASURED)
        assert flipped in proofs[num_steps].origin.peer_ids, "a discounted member must stay in the group"
        assert observed.trainer.state is not None
        return float((observed.trainer.state.theta_N - observed.inner.target_N).square().mean())

    async def main() -> None:
        assert await final_loss(discounts=True) < 0.5 * await final_loss(discounts=False)

    virtual_time.run(main())


def test_slices_of_drawn_contributions_are_freed_after_measuring_and_after_the_last_step() -> None:
    taken, drivers = list[int](), list[RoundDriver]()

    class Watched(AlteredMember):
        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            to_measure = driver.reductions._to_measure

            async def noted(auditing: Auditing, origin: Group, drawn: Sequence[str]) -> DrawnSlices | None:
                taken.append(origin.step)
                return await to_measure(auditing, origin, drawn)

            driver.reductions._to_measure = noted  # type: ignore[method-assign]
            drivers.append(driver)
            return await super()._drive(driver, context)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=3, held_out_scores=1)) as swarm:
            await swarm.join("m0", kind=Watched, inner=ChangedInner())
            await swarm.join("m1", inner=ChangedInner())
            await swarm.finish()
            assert taken == [1, 2]
            assert len(drivers) >= 3
            assert all(driver.reductions.measurable is None for driver in drivers)

    virtual_time.run(main())
