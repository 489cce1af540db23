"""Tests that forged or replayed messages of strangers and members are refused and do the run no harm."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.training_swarm import Member, Swarm, assert_equal_steps, certificate_of, certified, config, identity_of
from swarm.network.interface import Stream
from swarm.network.memory.memory_network import MemoryNetwork
from swarm.testing import virtual_time
from swarm.training.run.methods import Methods
from swarm.training.state.certificate import RunSignatures
from swarm.training.trainer_events import OuterStep, RoundAborted
from swarm_protocol.commit_messages import Lock, Outcome
from swarm_protocol.errors import IntegrityError, PeerTimeout, PeerViolation, RoundError
from swarm_protocol.identity import Identity
from swarm_protocol.reduction_messages import ReduceOpening
from swarm_protocol.training_messages import Contribution, Group, Ready, SignedGroup

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NUM_STEPS = 3


async def swarm_at_work(swarm: Swarm) -> tuple[Member, RunSignatures, MemoryNetwork]:
    """Return a member in its second step, and a stranger's signatures and network."""
    for index in range(2):
        await swarm.join(f"m{index}")
    member = swarm.members["m0"]
    while not member.of(OuterStep):
        await asyncio.sleep(0.01)
    identity = Identity(b"e" * 32)
    network = swarm.internet.network(identity)
    return member, RunSignatures(identity=identity, network_id="test", run=swarm.run.run_id), network


def _slow(function: object) -> float:
    return 1.0 if getattr(function, "__name__", "") == "_stretch" else 0.0


def test_forged_groups_and_votes_are_refused_and_change_nothing() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            member, stranger, network = await swarm_at_work(swarm)
            now = network.now()
            names = Methods(swarm.run.run_id)
            genuine = member.trainer._signatures.check_certificate(member.trainer.certificate, now)
            group = replace(genuine.origin, step=2)
            outcome = Outcome(origin_digest=bytes(32), part_digests=(), state_digest=bytes(32))
            vote = SignedGroup(group=group, signer="", data=b"", digest=bytes(32)).vote(outcome, "commit")
            # a stranger in no group signed it, so that nobody asks it for the group or checks a signature
            asked: list[bytes] = []

            async def show(_peer: str, request: bytes) -> bytes:
                asked.append(request)
                return forged_group.data

            await network.serve(names.group, show)
            forged_group = stranger.sign_group(group, now)
            opening = ReduceOpening(kind="exchange", part=0, step=2, group_digest=forged_group.digest)
            with pytest.raises(PeerTimeout):
                await exchange(network, member.peer_id, names.reduce, opening.to_bytes())
            assert asked == []
            # the signature is broken
            signature = stranger.sign_vote(vote).signature
            broken = replace(vote, signature=signature[:-1] + bytes([signature[-1] ^ 1]))
            # another member's vote, a prepare vote sent as a commit vote, and a vote of another run
            other = RunSignatures(identity=Identity(b"o" * 32), network_id="test", run=swarm.run.run_id)
            changed = replace(stranger.sign_vote(replace(vote, kind="prepare")), kind="commit")
            elsewhere = stranger.sign_vote(replace(vote, run="other"))
            for forged in (vote, broken, other.sign_vote(vote), changed, elsewhere):
                with pytest.raises((IntegrityError, PeerViolation)):
                    await network.call(member.peer_id, names.vote, forged.to_bytes(), timeout_s=1.0)
            # the stranger's own vote is well formed, and does not count
            await network.call(member.peer_id, names.vote, stranger.sign_vote(vote).to_bytes(), timeout_s=1.0)
            members = await swarm.finish("m0", "m1")
            await network.close()
            assert_equal_steps(members, NUM_STEPS)
            assert not any(each.of(RoundAborted) for each in members)

    virtual_time.run(main(), compute_s=_slow)


@pytest.mark.parametrize(("num_signers", "step"), [(1, NUM_STEPS), (2, NUM_STEPS + 1)], ids=["alone", "beyond the run"])
def test_certificate_that_the_runs_settings_forbid_overtakes_nobody(num_signers: int, step: int) -> None:
    """Otherwise one identity could certify a state of its own, any number of steps ahead, and all members would adopt
    it."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            member, stranger, network = await swarm_at_work(swarm)
            now, run = network.now(), swarm.run.run_id
            signers = [stranger, RunSignatures(identity=Identity(b"o" * 32), network_id="test", run=run)][:num_signers]
            peers = sorted(each.identity.peer_id for each in signers)
            group = Group(
                run=run,
                step=step,
                attempt=0,
                state_digest=bytes(32),
                members=tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1) for peer in peers),
                part_values=(1,) * num_signers,
                reduce_s=1.0,
                vote_s=1.0,
            )
            signed = stranger.sign_group(group, now)
            outcome = Outcome(
                origin_digest=signed.digest, part_digests=(bytes(32),) * num_signers, state_digest=bytes(32)
            )
            forged = certificate_of(signed, outcome, signers)
            with pytest.raises(PeerViolation, match="does not allow"):
                member.trainer._signatures.check_certificate(forged, now)
            await swarm.finish("m0", "m1")
            await network.close()

    virtual_time.run(main(), compute_s=_slow)


def test_certificate_of_enough_strangers_for_a_group_overtakes_nobody() -> None:
    """Strangers can sign any state at any number of steps. They are not members of the run."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            member, stranger, network = await swarm_at_work(swarm)
            signers = [stranger, RunSignatures(identity=Identity(b"o" * 32), network_id="test", run=swarm.run.run_id)]
            forged = [certified(signers, step, network.now()) for step in range(2, NUM_STEPS + 1)]

            async def show(_peer: str, stream: Stream) -> None:
                await stream.receive()
                for each in forged:
                    await stream.send(each)

            await network.serve_stream(Methods(swarm.run.run_id).history, show)
            assert member.trainer._steps is not None
            context = member.trainer._steps.context
            proof = context.signatures.check_certificate(forged[-1], network.now())
            assert proof.rank > context.replica.rank, "the forged certificate must be valid alone, and of a later step"
            driver = member.trainer._steps.service.driver
            assert driver is not None
            assert await driver.queries.overtaken(network.peer_id, forged[-1]) is None
            assert_equal_steps(await swarm.finish("m0", "m1"), NUM_STEPS)
            assert not member.of(RoundAborted)
            await network.close()

    virtual_time.run(main(), compute_s=_slow)


def test_newcomer_to_a_closed_run_refuses_a_certificate_of_strangers() -> None:
    admitted = tuple(sorted(identity_of(name).peer_id for name in ("m0", "m1", "newcomer")))

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS, admission=admitted)) as swarm:
            member, stranger, network = await swarm_at_work(swarm)
            signers = [stranger, RunSignatures(identity=Identity(b"o" * 32), network_id="test", run=swarm.run.run_id)]
            forged = certified(signers, NUM_STEPS, network.now())
            newcomer = await swarm.join("newcomer")
            while newcomer.trainer._steps is None:
                await asyncio.sleep(0.01)
            context = newcomer.trainer._steps.context
            assert (await context.check(member.trainer.certificate)).outer_step
            with pytest.raises(PeerViolation, match="does not admit"):
                await context.check(forged)
            assert_equal_steps(await swarm.finish("m0", "m1"), NUM_STEPS)
            await network.close()

    virtual_time.run(main(), compute_s=_slow)


async def exchange(network: MemoryNetwork, peer: str, method: str, message: bytes) -> None:
    async with network.stream(peer, method, timeout_s=1.0) as stream:
        await stream.send(message)
        await stream.receive()


def test_reduction_streams_of_another_round_are_refused() -> None:
    """A member replays the signed group of a committed step, and then one of a step that nobody has reached."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            member, _, network = await swarm_at_work(swarm)
            fellow = swarm.members["m1"]
            signatures, now = fellow.trainer._signatures, network.now()
            proof = signatures.check_certificate(member.trainer.certificate, now)
            names = Methods(swarm.run.run_id)
            for group in (proof.origin, replace(proof.origin, step=9)):
                digest = signatures.sign_group(group, now).digest
                opening = ReduceOpening(kind="exchange", part=0, step=group.step, group_digest=digest)
                with pytest.raises(RoundError, match="not at step"):
                    await exchange(fellow.network, member.peer_id, names.reduce, opening.to_bytes())
            members = await swarm.finish("m0", "m1")
            await network.close()
            assert_equal_steps(members, NUM_STEPS)
            assert not any(each.of(RoundAborted) for each in members)

    virtual_time.run(main(), compute_s=_slow)


def test_made_up_lock_of_a_stranger_does_not_give_it_the_run() -> None:
    """The lock needs no parts: its outcome is the present state with the stranger's two keys as the only members."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            member, stranger, network = await swarm_at_work(swarm)
            peers = sorted((network.peer_id, Identity(b"o" * 32).peer_id))
            refused = []

            async def claim(target: Member) -> None:
                service = target.trainer._steps.service
                assert service is not None
                # a member that is still at the first step would be at the next one before it reads this report
                while service.driver is None or service.driver.setup.step < 2:
                    await asyncio.sleep(0.001)
                setup, attempt = service.driver.setup, service.driver.state.attempt
                round_of = {"run": setup.run, "step": setup.step, "attempt": attempt}
                group = Group(
                    **round_of,  # type: ignore[arg-type]
                    state_digest=setup.state_digest,
                    members=tuple(Contribution(peer_id=peer) for peer in peers),
                    reduce_s=1.0,
                    vote_s=1.0,
                )
                signed = stranger.sign_group(group, network.now())
                state = replace(service._context.replica.current.manifest, roster=group.roster).digest()
                outcome = Outcome(origin_digest=signed.digest, part_digests=(), state_digest=state)
                ready = Ready(
                    **round_of,  # type: ignore[arg-type]
                    state_digest=setup.state_digest,
                    lock=Lock(attempt=attempt, group_digest=signed.digest, outcome=outcome, votes=()),
                    origin=signed.data,
                )
                data, method = stranger.sign_report(ready).to_bytes(), service._context.methods.ready
                with pytest.raises(PeerViolation, match="no member of the state"):
                    await network.call(target.peer_id, method, data, timeout_s=20.0)
                refused.append(target)

            await asyncio.gather(*map(claim, swarm.members.values()))
            assert len(refused) == 2
            members = await swarm.finish("m0", "m1")
            await network.close()
            assert_equal_steps(members, NUM_STEPS)
            assert member.trainer.state is not None
            assert set(member.trainer.state.manifest.roster) == {each.peer_id for each in members}

    virtual_time.run(main(), compute_s=_slow)
