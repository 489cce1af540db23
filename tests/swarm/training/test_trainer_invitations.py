"""Tests that newcomers enter a run of whole trainers by an invitation or by vouches, and that others do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.lying_owners import owner_that, times_minus_ten
from support.training_swarm import (
    AUTHOR,
    Member,
    Swarm,
    SyntheticInner,
    assert_equal_steps,
    config,
    identity_of,
    interval_cost,
)
from swarm.network.memory.memory_network import EPOCH_S
from swarm.testing import virtual_time
from swarm.training.round.group_formation import OWN_EXPIRED
from swarm.training.round.group_members import NOT_INVITED
from swarm.training.run.methods import Methods
from swarm.training.run.run_config import RunConfig
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm.training.state.lease import trainers_of
from swarm.training.trainer_events import (
    InvitationRefused,
    MemberConvicted,
    OnProbation,
    OuterStep,
    RoundAborted,
    RunEntered,
)
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.run_credentials import (
    RunInvitation,
    RunRevocation,
    invite_to_run,
    sign_revocation,
    vouch_for,
)

pytestmark = pytest.mark.usefixtures("only_errors_logged")

FIRST_STEPS, NUM_STEPS = 5, 10


def invitation(swarm: Swarm, signer: Identity = AUTHOR, *, max_uses: int = 1, node: str = "") -> RunInvitation:
    now = EPOCH_S + asyncio.get_running_loop().time()
    return invite_to_run(
        signer, swarm.run.run_id, network_id="test", now=now, lifetime_s=3600.0, max_uses=max_uses, node=node
    )


def vouch(swarm: Swarm, by: str, newcomer: str) -> RunInvitation:
    member = swarm.members[by]
    return vouch_for(
        identity_of(by),
        swarm.run.run_id,
        identity_of(newcomer).peer_id,
        network_id="test",
        now=member.network.now(),
        lifetime_s=3600.0,
    )


async def _until_step(member: Member, step: int) -> None:
    while not any(event.step >= step for event in member.of(OuterStep)):
        await asyncio.sleep(0.05)


async def _under_way(swarm: Swarm, num_members: int = 3) -> list[Member]:
    members = [await swarm.join(f"m{index}") for index in range(num_members)]
    for member in members:
        await _until_step(member, FIRST_STEPS)
    return members


def _proof(swarm: Swarm, member: Member) -> Proof:
    """Return the proof in the newest certificate, read with nothing but the run's file."""
    reader = RunSignatures.of_run(swarm.run, Identity(b"onlooker".ljust(32)), "test")
    return reader.check_certificate(member.trainer.certificate, member.network.now())


def _trains(member: Member, of: Member) -> bool:
    """Return whether the state of `of` has a lease for `member`."""
    assert of.trainer.state is not None
    return member.peer_id in trainers_of(of.trainer.state.manifest.stripes)


@pytest.mark.parametrize("is_bound", [False, True])
def test_newcomer_counts_fully_at_its_first_step_with_an_invitation_and_is_on_probation_without(is_bound: bool) -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            members = await _under_way(swarm)
            node = identity_of("friend").peer_id if is_bound else ""
            friend = await swarm.join("friend", invitations=(invitation(swarm, node=node),))
            stranger = await swarm.join("stranger")
            while not (friend.of(OuterStep) and stranger.of(OuterStep)):
                await asyncio.sleep(0.05)
            proof = _proof(swarm, friend)
            assert friend.peer_id in proof.roster
            assert friend.peer_id in proof.origin.deciding
            assert stranger.peer_id not in proof.roster
            assert not friend.of(OnProbation)
            assert stranger.of(OnProbation)[0].steps_left == 4
            (entered,) = friend.of(RunEntered)
            assert entered.how.startswith("invited, serial ")
            assert not stranger.of(RunEntered)
            assert_equal_steps(await swarm.finish(*(each.name for each in (*members, friend))), NUM_STEPS)

    virtual_time.run(main(), compute_s=interval_cost)


def test_newcomer_learns_once_that_another_one_has_used_up_its_invitation() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=2 * NUM_STEPS)) as swarm:
            members = await _under_way(swarm)
            word = invitation(swarm)
            friends = [await swarm.join(name, invitations=(word,)) for name in ("friend", "other")]
            await swarm.finish(*(each.name for each in (*members, *friends)))
            [entered] = [event for each in friends for event in each.of(RunEntered)]
            [refused] = [event for each in friends for event in each.of(InvitationRefused)]
            assert (refused.serial, refused.reason) == (entered.how.split()[-1], "is used up (1 of 1)")

    virtual_time.run(main(), compute_s=interval_cost)


def test_run_that_requires_invitations_begins_with_invited_founders_and_leaves_others_out() -> None:
    async def main() -> None:
        run = config(min_group=3, outer_steps=NUM_STEPS, invitations="required", admission=(identity_of("m0").peer_id,))
        async with Swarm(run) as swarm:
            first = await swarm.join("m0")
            word = invitation(swarm, max_uses=2)
            founders = [first, *[await swarm.join(name, invitations=(word,)) for name in ("m1", "m2")]]
            await _until_step(first, 1)
            stranger = await swarm.join("stranger")
            third_use = await swarm.join("m3", invitations=(word,))
            for member in founders:
                await _until_step(member, FIRST_STEPS)
            assert first.trainer.state is not None
            assert len(first.trainer.state.manifest.register.entries) == 2, (
                "two of the three peers with the invitation may enter"
            )
            assert all(_trains(member, first) for member in founders)
            assert not _trains(stranger, first)
            assert not _trains(third_use, first)
            assert any(NOT_INVITED in event.reason for event in stranger.of(RoundAborted)), stranger.of(RoundAborted)

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize("forged", ["another signer", "replayed"])
def test_forged_or_stolen_invitation_admits_nobody(forged: str) -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            await _under_way(swarm)
            if forged == "another signer":
                word = invitation(swarm, identity_of("thief"))
            else:
                word = invitation(swarm, node=identity_of("friend").peer_id)
            thief = await swarm.join("thief", invitations=(word,))
            assert thief.task is not None
            await asyncio.wait({thief.task})
            assert thief.task.exception() is not None
            assert not thief.of(OuterStep)

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize("num_vouchers", [1, 2])
def test_newcomer_counts_fully_only_when_enough_members_vouched_for_it(num_vouchers: int) -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS, vouchers=2)) as swarm:
            await _under_way(swarm)
            vouches = tuple(vouch(swarm, by, "friend") for by in ("m0", "m1")[:num_vouchers])
            friend = await swarm.join("friend", invitations=vouches)
            while not friend.of(OuterStep):
                await asyncio.sleep(0.05)
            proof = _proof(swarm, friend)
            assert (friend.peer_id in proof.roster) == (num_vouchers == 2)
            assert bool(friend.of(OnProbation)) == (num_vouchers == 1)
            assert friend.trainer.state is not None
            entries = friend.trainer.state.manifest.register.entries
            assert [each.vouchers for each in entries] == [
                tuple(sorted(swarm.members[name].peer_id for name in ("m0", "m1")))
            ] * (num_vouchers == 2)

    virtual_time.run(main(), compute_s=interval_cost)


def test_invited_newcomer_of_a_full_run_enters_through_a_head() -> None:
    async def main() -> None:
        run = config(min_group=2, max_group=2, cluster_size=4, outer_steps=NUM_STEPS, invitations="required")
        async with Swarm(run) as swarm:
            word = invitation(swarm, max_uses=2)
            members = [await swarm.join(f"m{index}", invitations=(word,)) for index in range(2)]
            for member in members:
                await _until_step(member, FIRST_STEPS)
            friend = await swarm.join("friend", invitations=(invitation(swarm),))
            stranger = await swarm.join("stranger")
            while not friend.of(RunEntered):
                await asyncio.sleep(0.05)
            (entered,) = friend.of(RunEntered)
            assert entered.how.startswith("invited")
            assert not friend.of(OnProbation)
            assert _trains(friend, members[0])
            await _until_step(members[0], entered.step + 2)
            assert not _trains(stranger, members[0])
            assert_equal_steps(await swarm.finish("m0", "m1", "friend"), NUM_STEPS)

    virtual_time.run(main(), compute_s=interval_cost)


def test_voucher_of_a_convicted_liar_is_on_probation_again() -> None:
    """The liar multiplies its reduced part. Members that have its vouchers in their state name these in their
    reports."""

    async def main() -> None:
        run: RunConfig = config(min_group=2, outer_steps=30, vouchers=1)
        async with Swarm(run) as swarm:
            members = await _under_way(swarm, 4)
            kind = owner_that(times_minus_ten, range(10, 99))
            liar = await swarm.join("liar", kind=kind, invitations=(vouch(swarm, "m0", "liar"),))
            while not all(member.of(MemberConvicted) for member in members):
                await asyncio.sleep(0.05)
            assert liar.of(RunEntered)
            voucher = members[0]
            while not voucher.of(OnProbation):
                await asyncio.sleep(0.05)
            assert voucher.of(OnProbation)[0].steps_left == 4
            assert not any(member.of(OnProbation) for member in members[1:])
            assert voucher.peer_id not in _proof(swarm, members[1]).roster

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize("rule", ["welcome", "required"])
def test_revocation_given_to_one_member_reaches_the_state_and_removes_or_demotes_peers_that_entered_by_it(
    rule: str,
) -> None:
    async def main() -> None:
        founders = tuple(sorted(identity_of(f"m{index}").peer_id for index in range(3)))
        changes: dict[str, object] = {"admission": founders} if rule == "required" else {}
        run = config(min_group=2, outer_steps=40, invitations=rule, **changes)
        async with Swarm(run) as swarm:
            members = await _under_way(swarm)
            word = invitation(swarm, max_uses=3)
            friend = await swarm.join("friend", invitations=(word,))
            while not (friend.of(RunEntered) and _trains(friend, members[0])):
                await asyncio.sleep(0.05)
            assert word.terms is not None
            revocation = RunRevocation(run=swarm.run.run_id, serials=(word.terms.serial,))
            network, method = friend.network, Methods(swarm.run.run_id).revoke
            forged = sign_revocation(identity_of("friend"), revocation, network_id="test", now=network.now())
            with pytest.raises(PeerViolation):
                await network.call(members[1].peer_id, method, forged, timeout_s=5.0)
            data = sign_revocation(AUTHOR, revocation, network_id="test", now=network.now())
            await network.call(members[1].peer_id, method, data, timeout_s=5.0)
            step = members[0].trainer.state.outer_step if members[0].trainer.state else 0
            await _until_step(members[0], step + 3)
            state = members[0].trainer.state
            assert state is not None
            assert state.manifest.register.revoked == (word.terms.serial,)
            assert friend.peer_id not in state.manifest.roster
            late = await swarm.join("late", invitations=(word,))
            await _until_step(members[0], state.outer_step + 3)
            if rule == "required":
                assert not _trains(friend, members[0])
                assert not _trains(late, members[0])
            else:
                assert friend.of(OnProbation)[0].steps_left == 4
                assert late.of(OnProbation)[0].steps_left == 4

    virtual_time.run(main(), compute_s=interval_cost)


def test_nobody_is_blamed_when_an_invitation_expires_while_the_round_waits() -> None:
    """The newcomer is ready at once, and then waits for the others' interval, which outlasts its invitation."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=3)) as swarm:
            members = [await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=40.0)) for index in range(2)]
            await _until_step(members[0], 1)
            now = EPOCH_S + asyncio.get_running_loop().time()
            short = invite_to_run(AUTHOR, swarm.run.run_id, network_id="test", now=now, lifetime_s=140.0)
            friend = await swarm.join("friend", inner=SyntheticInner(virtual_step_s=40.0), invitations=(short,))
            await swarm.finish("m0", "m1")
            (aborted,) = friend.of(RoundAborted)
            assert (aborted.reason, aborted.missing) == (OWN_EXPIRED, ())
            for member in members:
                assert not member.of(RoundAborted)
                assert [event.step for event in member.of(OuterStep)] == [1, 2, 3]
            assert friend.of(OnProbation), "the newcomer must continue without the invitation"

    virtual_time.run(main())


def test_late_member_checks_the_founders_expired_credentials_in_a_run_that_requires_invitations() -> None:
    """Certificates hold the founders' credentials as they were when the groups were signed. A newcomer checks them long
    after they have expired, and enters with its own invitation."""
    lifetime_s = 140.0

    async def main() -> None:
        run = config(min_group=3, outer_steps=6, invitations="required", admission=(identity_of("m0").peer_id,))
        async with Swarm(run) as swarm:
            begun_at = asyncio.get_running_loop().time()
            now, names = EPOCH_S + begun_at, ("m1", "m2")
            word = invite_to_run(
                AUTHOR, swarm.run.run_id, network_id="test", now=now, lifetime_s=lifetime_s, max_uses=2
            )
            first = await swarm.join("m0", inner=SyntheticInner(virtual_step_s=10.0))
            for name in names:
                await swarm.join(name, inner=SyntheticInner(virtual_step_s=10.0), invitations=(word,))
            await _until_step(first, 4)
            assert asyncio.get_running_loop().time() > begun_at + lifetime_s
            late = await swarm.join("late", inner=SyntheticInner(virtual_step_s=10.0), invitations=(invitation(swarm),))
            assert_equal_steps(await swarm.finish("m0", *names), 6)
            assert late.of(RunEntered)
            assert _trains(late, first)
            replica = first.trainer.replica
            assert replica is not None
            links = replica.history.since(0)
            reader = RunSignatures.of_run(swarm.run, Identity(b"onlooker".ljust(32)), "test")
            checked = [reader.check_certificate(link.certificate, late.network.now()) for link in links]
            (founding,) = [proof for proof in checked if proof.outer_step == 0]
            shown = {each.peer_id for each in founding.origin.credentials}
            assert shown == {identity_of(name).peer_id for name in names}
            assert {*founding.roster} == shown | {first.peer_id}
            stripped = replace(
                founding.origin, members=tuple(replace(each, credentials=()) for each in founding.origin.members)
            )
            with pytest.raises(PeerViolation, match="did not sign"):
                reader.check_reports(reader.sign_group(stripped, late.network.now()))

    virtual_time.run(main())
