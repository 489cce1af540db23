"""Tests that many fresh keys in a running open run take neither its seats nor its votes nor its weight."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support.training_swarm import Swarm, SyntheticInner, assert_equal_steps, config, interval_cost
from swarm.testing import virtual_time
from swarm.training.run.run_config import RunConfig
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm.training.trainer_events import OnProbation, OuterStep
from swarm_protocol.identity import Identity
from torch import Tensor

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NUM_HONEST, NUM_SYBILS, FIRST_STEPS = 4, 12, 4


def _flipped(theta_N: Tensor) -> Tensor:
    """Return weights whose pseudo-gradient is the honest one times minus ten."""
    target_N = torch.randn(theta_N.numel(), generator=torch.Generator().manual_seed(7))
    return theta_N - 2.0 * (target_N - theta_N)


async def _run(run: RunConfig) -> tuple[list[Proof], set[str], float]:
    """Return the proofs of all steps, the honest members, and the loss at the end."""
    proofs = dict[int, Proof]()
    async with Swarm(run) as swarm:
        honest = [await swarm.join(f"m{index}") for index in range(NUM_HONEST)]
        while not all(len(member.of(OuterStep)) >= FIRST_STEPS for member in honest):
            await asyncio.sleep(0.05)
        for index in range(NUM_SYBILS):
            await swarm.join(f"sybil{index}", inner=SyntheticInner(corrupt=_flipped))
        reader, seen = RunSignatures.of_run(swarm.run, Identity(b"onlooker".ljust(32)), "test"), b""
        while max(proofs, default=0) < run.outer_steps:
            await asyncio.sleep(0.05)
            if honest[0].trainer.certificate == seen:
                continue
            seen = honest[0].trainer.certificate
            proof = reader.check_certificate(seen, honest[0].network.now())
            if proof.origin.num_tokens:
                proofs[proof.outer_step] = proof
        members = await swarm.finish(*(member.name for member in honest))
        assert_equal_steps(members, run.outer_steps)
        announced = [member.of(OnProbation)[:1] for name, member in swarm.members.items() if name.startswith("sybil")]
        assert [event.steps_left for events in announced for event in events] == [
            run.probation.steps
        ] * NUM_SYBILS * bool(run.probation.steps)
        assert honest[0].trainer.state is not None
        loss = float((honest[0].trainer.state.theta_N - honest[0].inner.target_N).square().mean())
        return list(proofs.values()), {member.peer_id for member in honest}, loss


@pytest.mark.parametrize("cluster_size", [1, 8])
def test_twelve_fresh_keys_get_few_seats_little_weight_and_no_votes(cluster_size: int) -> None:
    run = config(min_group=2, outer_steps=6, cluster_size=cluster_size, aggregator="mean", fallback="")

    async def main() -> None:
        proofs, honest, loss = await _run(run)
        late = [proof for proof in proofs if proof.outer_step > FIRST_STEPS]
        assert any(set(proof.origin.peer_ids) - honest for proof in late), "no fresh key took part in a round"
        for proof in late:
            group = proof.origin
            strangers = [each for each in group.members if each.peer_id not in honest]
            assert len(strangers) <= 2
            assert set(group.deciding) <= honest
            assert set(proof.roster) <= honest
            assert set(proof.voters) <= honest
            weights = run.probation.weights(group.members)
            of_strangers = [
                weight for each, weight in zip(group.members, weights, strict=True) if each.peer_id not in honest
            ]
            assert sum(of_strangers) <= 0.25 * sum(weights) + len(of_strangers)
        assert loss < 1.0

    virtual_time.run(main(), compute_s=interval_cost)


def test_twelve_fresh_keys_ruin_a_run_without_probation() -> None:
    """This is the attack that probation prevents."""

    async def main() -> None:
        run = config(min_group=2, outer_steps=7, cluster_size=1, probation_steps=0, aggregator="mean", fallback="")
        proofs, honest, loss = await _run(run)
        assert max(len(set(proof.origin.peer_ids) - honest) for proof in proofs) == NUM_SYBILS
        assert not loss < 1.0

    virtual_time.run(main(), compute_s=interval_cost)


def test_restarted_newcomer_reports_again_that_it_is_on_probation() -> None:
    """It reports so before the next step is committed. No other member is present here, so that none is further."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=90)) as swarm:
            members = [await swarm.join(name) for name in ("m0", "m1")]
            while not all(len(member.of(OuterStep)) >= FIRST_STEPS for member in members):
                await asyncio.sleep(0.05)
            newcomer = await swarm.join("late")
            while not newcomer.of(OuterStep):
                await asyncio.sleep(0.05)
            left, state = newcomer.of(OnProbation)[-1].steps_left, newcomer.trainer.state
            certificate = newcomer.trainer.certificate
            assert left > 0
            for name in ("m0", "m1", "late"):
                swarm.kill(name)
            again = await swarm.join("late", state=state, certificate=certificate)
            async with asyncio.timeout(300):
                while not again.of(OnProbation):
                    await asyncio.sleep(0.05)
            (announced,) = again.of(OnProbation)
            assert (announced.steps_left, again.of(OuterStep)) == (left, [])

    virtual_time.run(main(), compute_s=interval_cost)
