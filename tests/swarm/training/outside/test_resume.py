"""Tests that only a run's author can let some members go on without the others, and that one history remains."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from support.training_swarm import (
    AUTHOR,
    Member,
    Swarm,
    assert_equal_steps,
    certificate_of,
    config,
    identity_of,
    interval_cost,
)
from swarm.network.membership import Membership
from swarm.testing import virtual_time
from swarm.training.outside.observer import Observer
from swarm.training.outside.resume import deliver, sign_order, survey
from swarm.training.run.methods import Methods
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.state_sync import follows
from swarm.training.trainer_events import OuterStep, RoundAborted, RunResumed
from swarm_protocol.commit_messages import Certificate, Outcome, ResumeOrder
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import ConfigError, IntegrityError, PeerTimeout, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.records import TrainerRecord
from swarm_protocol.training_messages import Contribution, Group

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NUM_STEPS = 7
ONLOOKER = Identity(b"onlooker".ljust(32))


async def founded(swarm: Swarm, num_members: int) -> list[Member]:
    """Return members that have committed an outer step together, in the order of their peer ids."""
    for index in range(num_members):
        await swarm.join(f"m{index}")
    while not all(member.of(OuterStep) for member in swarm.members.values()):
        await asyncio.sleep(0.05)
    return sorted(swarm.members.values(), key=lambda member: member.peer_id)


async def resumed(swarm: Swarm, seen: Collection[Member], roster: Collection[Member]) -> bytes:
    """Give the author's order for `roster` to the first of `seen`. The author sees only the peers in `seen`."""
    network = swarm.internet.network(ONLOOKER)
    situation = await survey(network, swarm.run, [member.peer_id for member in seen])
    peers = [member.peer_id for member in roster]
    certificate = sign_order(swarm.run, situation, peers, AUTHOR, network_id="test", now=network.now())
    first = next(iter(seen)).peer_id
    assert await deliver(network, Methods(swarm.run.run_id).resume, certificate, [first]) == {first: ""}
    await network.close()
    return certificate


def test_run_continues_without_half_of_its_members_when_one_member_has_the_authors_order() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS, majority_after_s=5.0)) as swarm:
            members = await founded(swarm, 4)
            for dead in members[:2]:
                swarm.kill(dead.name)
            await swarm.join("fresh0")
            await swarm.join("fresh1")
            await asyncio.sleep(30.0)
            living = members[2:]
            num_steps = len(living[0].of(OuterStep))
            assert num_steps < NUM_STEPS
            await resumed(swarm, living, living)
            # later members get the order from present ones
            await asyncio.sleep(1.0)
            newcomer = await swarm.join("newcomer")
            assert_equal_steps(await swarm.finish(timeout_s=120), NUM_STEPS)
            for member in living:
                (event,) = member.of(RunResumed)
                assert event.roster == tuple(member.peer_id for member in living)
                assert event.digest == member.of(OuterStep)[event.step - 1].digest
            assert newcomer.trainer.certificate
            for step in range(1, NUM_STEPS + 1):
                digests = {e.digest for each in swarm.members.values() for e in each.of(OuterStep) if e.step == step}
                assert len(digests) == 1

    virtual_time.run(main(), compute_s=interval_cost)


def test_order_ends_in_the_history_that_the_author_named_when_others_went_on() -> None:
    """The author was wrong: the others still train behind a partition. Their steps since then are lost, as the author
    was warned."""

    async def main() -> None:
        run = config(min_group=2, outer_steps=11, majority_after_s=5.0)
        async with Swarm(run) as swarm, AsyncExitStack() as stack:
            members = await founded(swarm, 5)
            few, most = members[:2], members[2:]
            swarm.internet.partition([[each.peer_id for each in few] + [ONLOOKER.peer_id]])
            watcher = swarm.internet.network(Identity(b"w" * 32))
            stack.push_async_callback(watcher.close)
            membership = await stack.enter_async_context(Membership(watcher))
            observer, seen = Observer(watcher, membership, swarm.run), list[int]()
            while len(most[0].of(OuterStep)) < 5:
                seen += [each.outer_step for each in await observer.look({most[0].peer_id: _record(most[0])})]
                await asyncio.sleep(0.1)
            await resumed(swarm, few, few)
            await asyncio.sleep(3.0)
            ahead = most[0].of(OuterStep)[-1].step
            assert few[0].of(OuterStep)[-1].step < ahead
            swarm.internet.heal()
            assert_final_states_equal(await swarm.finish(timeout_s=300), 11)
            final = {each.digest for each in members[0].of(OuterStep) if each.step == 11}
            assert final == {members[0].digest}
            # the observer reports all steps since the author's order, also those whose numbers it has reported before
            assert seen[-1] > 3
            again = [each.outer_step for each in await observer.look({few[0].peer_id: _record(few[0])})]
            assert again[0] < seen[-1]
            assert again[-1] == 11
            for member in most:
                assert any(event.sequence for event in member.of(RunResumed)) or member.of(OuterStep)[-1].step == 11

    virtual_time.run(main(), compute_s=interval_cost)


def assert_final_states_equal(members: list[Member], num_steps: int) -> None:
    assert {member.trainer.state.outer_step for member in members if member.trainer.state} == {num_steps}
    assert len({member.digest for member in members}) == 1


def test_member_refuses_an_order_that_is_forged_old_or_for_others() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            members = await founded(swarm, 2)
            certificate = await resumed(swarm, members, members)
            while not members[0].of(RunResumed):
                await asyncio.sleep(0.01)
            network = swarm.internet.network(ONLOOKER)
            now, target = network.now(), members[0].peer_id
            signatures = RunSignatures.of_run(swarm.run, AUTHOR, "test")
            order = signatures.read_order(Certificate.from_bytes(certificate).order, now)

            async def refusal(order: ResumeOrder, signer: RunSignatures = signatures) -> str:
                data = Certificate(order=signer.sign(order, now)).to_bytes()
                return (await deliver(network, Methods(swarm.run.run_id).resume, data, [target]))[target]

            later = replace(order, sequence=order.sequence + 1)
            stranger = RunSignatures.of_run(swarm.run, ONLOOKER, "test")
            assert "not signed by the run's author" in await refusal(later, stranger)
            assert "goes on by the resume order" in await refusal(replace(order, sequence=order.sequence - 1))
            assert "goes on by the resume order" in await refusal(replace(order, roster=(target,)))
            assert "after which the run is over" in await refusal(replace(later, outer_step=NUM_STEPS))
            assert "for another run" in await refusal(replace(later, run="another"), signatures)
            votes = members[0].trainer.certificate
            if not Certificate.from_bytes(votes).order:
                method = Methods(swarm.run.run_id).resume
                assert "no resume order" in (await deliver(network, method, votes, [target]))[target]
            await network.close()
            assert_equal_steps(await swarm.finish(), NUM_STEPS)

    virtual_time.run(main(), compute_s=interval_cost)


def test_member_follows_only_one_of_two_orders_with_the_same_sequence() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            members = await founded(swarm, 2)
            certificate = await resumed(swarm, members, members)
            while not members[0].of(RunResumed):
                await asyncio.sleep(0.01)
            assert members[0].trainer._steps is not None
            context = members[0].trainer._steps.context
            now, signatures = swarm.internet.network(ONLOOKER).now(), RunSignatures.of_run(swarm.run, AUTHOR, "test")
            order = signatures.read_order(Certificate.from_bytes(certificate).order, now)
            other = signatures.sign(replace(order, roster=(members[0].peer_id,)), now)
            proof = context.signatures.check_certificate(Certificate(order=other).to_bytes(), now)
            assert not await follows(context, ONLOOKER.peer_id, proof)
            later = signatures.sign(replace(order, sequence=order.sequence + 1), now)
            proof = context.signatures.check_certificate(Certificate(order=later).to_bytes(), now)
            assert await follows(context, ONLOOKER.peer_id, proof)

    virtual_time.run(main(), compute_s=interval_cost)


def test_the_later_of_two_orders_signed_in_one_second_wins_though_its_author_did_not_see_the_first() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            peers = [member.peer_id for member in await founded(swarm, 2)]
            network = swarm.internet.network(ONLOOKER)
            situation, now = await survey(network, swarm.run, peers), float(int(network.now()) + 1)
            signatures = RunSignatures.of_run(swarm.run, AUTHOR, "test")
            proofs = [
                signatures.check_certificate(
                    sign_order(swarm.run, situation, roster, AUTHOR, network_id="test", now=at), at
                )
                for roster, at in ((peers, now), (peers[:1], now + 0.001))
            ]
            assert proofs[0].rank < proofs[1].rank
            assert proofs[0].sequence < proofs[1].sequence
            await network.close()

    virtual_time.run(main(), compute_s=interval_cost)


def test_order_is_signed_only_by_the_author_and_only_for_admitted_members() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            members = await founded(swarm, 2)
            network = swarm.internet.network(ONLOOKER)
            peers = [member.peer_id for member in members]
            situation = await survey(network, swarm.run, peers)
            assert set(situation.holders) <= set(peers)
            with pytest.raises(ConfigError, match="only that key can resume it"):
                sign_order(swarm.run, situation, peers, ONLOOKER, network_id="test", now=network.now())
            closed = replace(swarm.run, config=replace(swarm.run.config, admission=tuple(sorted(peers))))
            with pytest.raises(ConfigError, match="does not admit"):
                sign_order(closed, situation, [ONLOOKER.peer_id], AUTHOR, network_id="test", now=network.now())
            with pytest.raises(ConfigError, match="cannot be resumed like this"):
                sign_order(swarm.run, situation, [], AUTHOR, network_id="test", now=network.now())
            with pytest.raises(PeerTimeout, match="shows a certified state"):
                await survey(network, swarm.run, [ONLOOKER.peer_id])
            await swarm.finish()
            situation = await survey(network, swarm.run, peers)
            with pytest.raises(ConfigError, match="finished"):
                sign_order(swarm.run, situation, peers, AUTHOR, network_id="test", now=network.now())
            await network.close()

    virtual_time.run(main(), compute_s=interval_cost)


def test_survey_asks_every_member_of_the_shown_state() -> None:
    """The order would leave out a member that was not asked. In a closed run, strangers crowd out no member."""
    names = tuple(f"m{index}" for index in range(4))
    admitted = tuple(sorted(identity_of(name).peer_id for name in names))
    strangers = [Identity(bytes([number + 100]) * 32).peer_id for number in range(100)]

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS, admission=admitted)) as swarm:
            members = await founded(swarm, len(names))
            swarm.kill(members[0].name)
            await asyncio.sleep(1.0)
            network = swarm.internet.network(ONLOOKER)
            situation = await survey(network, swarm.run, [*strangers, members[1].peer_id])
            assert set(situation.holders) == {member.peer_id for member in members[1:]}
            assert situation.absent == (members[0].peer_id,)
            await network.close()

    virtual_time.run(main(), compute_s=interval_cost)


def test_certificate_of_strangers_with_a_genuine_order_does_not_follow_from_the_history() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            members = await founded(swarm, 2)
            network = swarm.internet.network(ONLOOKER)
            situation = await survey(network, swarm.run, [members[0].peer_id])
            peers = [member.peer_id for member in members]
            order = Certificate.from_bytes(
                sign_order(swarm.run, situation, peers, AUTHOR, network_id="test", now=network.now())
            ).order
            signers = [RunSignatures.of_run(swarm.run, Identity(bytes([n]) * 32), "test") for n in range(2)]
            forged = _forged(signers, order, NUM_STEPS, network.now())
            assert members[0].trainer._steps is not None
            context = members[0].trainer._steps.context
            proof = context.signatures.check_certificate(forged, network.now())
            assert proof.rank > context.replica.rank
            assert not await follows(context, network.peer_id, proof)
            with pytest.raises((PeerViolation, IntegrityError)):
                context.signatures.check_certificate(
                    _forged(signers, order[:-1] + bytes([order[-1] ^ 1]), NUM_STEPS, network.now()), 1.75e9
                )
            await network.close()

    virtual_time.run(main(), compute_s=interval_cost)


def _forged(signers: list[RunSignatures], order: bytes, step: int, now: float) -> bytes:
    peers = sorted(each.identity.peer_id for each in signers)
    group = Group(
        run=signers[0].run,
        step=step,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=peer) for peer in peers),
        reduce_s=1.0,
        vote_s=1.0,
        order=order,
    )
    sequence = ResumeOrder.from_bytes(Envelope.parse(order).payload).sequence
    signed = signers[0].sign_group(group, now, sequence)
    outcome = Outcome(origin_digest=signed.digest, part_digests=(), state_digest=bytes(32))
    return certificate_of(signed, outcome, signers)


def test_member_knows_the_order_after_a_restart_from_a_resumed_state() -> None:
    async def main() -> None:
        run = config(min_group=2, outer_steps=NUM_STEPS)
        async with Swarm(run) as swarm:
            members = await founded(swarm, 2)
            await resumed(swarm, members, members[:1])
            while not members[0].of(RunResumed):
                await asyncio.sleep(0.001)
            state, certificate = members[0].trainer.state, members[0].trainer.certificate
            assert Certificate.from_bytes(certificate).order
        async with Swarm(run) as again:
            await again.join(members[0].name, state=state, certificate=certificate)
            await again.join("fresh")
            # one of its state's two members, which would be too few without the order
            assert_equal_steps(await again.finish(), NUM_STEPS)

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize("cluster_size", [1, 8])
def test_run_with_too_few_seats_for_newcomers_says_so_and_continues_once_its_author_has_named_them(
    cluster_size: int,
) -> None:
    async def main() -> None:
        run = config(min_group=3, outer_steps=NUM_STEPS, cluster_size=cluster_size)
        async with Swarm(run) as swarm:
            members = await founded(swarm, 3)
            while members[0].trainer.state is None or members[0].trainer.state.outer_step < run.probation.steps:
                await asyncio.sleep(0.05)
            newcomers = [await swarm.join(f"new{index}") for index in range(3)]
            while not all(member.trainer.has_joined for member in newcomers):
                await asyncio.sleep(0.05)
            for member in members[1:]:
                member.trainer.stop()
            await swarm.finish(*(member.name for member in members[1:]))
            await asyncio.sleep(60.0)
            assert (
                "2 of the 3 members that a step needs are ready (proven: 1), and newcomers on probation have no more "
                "seats beside these (seats: 1): the run waits until 2 proven members are ready, or "
            ) in members[0].of(RoundAborted)[-1].reason
            await resumed(swarm, [members[0], *newcomers], [members[0], *newcomers])
            assert_equal_steps(await swarm.finish(members[0].name, *(each.name for each in newcomers)), NUM_STEPS)

    virtual_time.run(main(), compute_s=interval_cost)


def test_observer_follows_the_history_that_the_author_named() -> None:
    async def main() -> list[int]:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            members = await founded(swarm, 3)
            network = swarm.internet.network(Identity(b"w" * 32))
            async with Membership(network) as membership:
                observer = Observer(network, membership, swarm.run)
                while observer.outer_step < 1:
                    await observer.look(await observer.members())
                    await asyncio.sleep(0.1)
                for dead in members[:2]:
                    swarm.kill(dead.name)
                await swarm.join("fresh")
                await asyncio.sleep(30.0)
                await resumed(swarm, members[2:], members[2:])
                steps: list[int] = []
                async with asyncio.timeout(120.0):
                    while observer.outer_step < NUM_STEPS:
                        steps += [
                            step.outer_step for step in await observer.look({members[2].peer_id: _record(members[2])})
                        ]
                        await asyncio.sleep(0.5)
            await network.close()
            await swarm.finish()
            return steps

    steps = virtual_time.run(main(), compute_s=interval_cost)
    assert steps[-1] == NUM_STEPS
    assert steps == sorted(set(steps))


def _record(member: Member) -> TrainerRecord:
    assert member.trainer.state is not None
    step, digest = member.trainer.state.outer_step, member.trainer.digest
    return TrainerRecord(run="run", outer_step=step, digest=digest, state="training")
