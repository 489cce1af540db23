"""Tests groups that streams name by their digest: which peer is asked for them, and what a stranger's group costs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from support import round_scripts
from support.training_swarm import AlteredMember, Swarm, SyntheticInner, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.shown_groups import MAX_GROUPS, ShownGroups
from swarm.training.round.round_events import Event, Grouped
from swarm.training.run.methods import Methods
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import OuterStep
from swarm_protocol.errors import IntegrityError, PeerRefused, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.reduction_messages import GroupRequest
from swarm_protocol.training_messages import Contribution, Group, ReadyReply, SignedGroup

ME, COORDINATOR, STRANGER = (Identity(bytes([number]) * 32) for number in range(1, 4))
RUN = "stdlib-1f00ba44"
NUM_STEPS = 8
NOW = 1000.0


class Counting:
    """A run's signatures that count the groups they read."""

    def __init__(self) -> None:
        self._signatures = RunSignatures(identity=ME, network_id="test", run=RUN)
        self.num_read = 0

    def read_group(self, data: bytes, now: float) -> SignedGroup:
        self.num_read += 1
        return self._signatures.read_group(data, now)

    def check_reports(self, _signed: SignedGroup) -> None:
        """`test_certificate` has these."""


def groups_of(context: object, taken: list[SignedGroup]) -> ShownGroups:
    """Return the groups of one step. Groups that others have shown are appended to `taken`."""

    def feed(event: Event) -> None:
        assert isinstance(event, Grouped)
        taken.append(event.signed)

    state = SimpleNamespace(attempt=0, coordinator=COORDINATOR.peer_id, setup=SimpleNamespace(roster=()))
    step = SimpleNamespace(context=context, state=state, setup=state.setup, feed=feed, convictions=MagicMock())
    return ShownGroups(cast(Any, step))


def signed_by(signer: Identity, *others: Identity) -> SignedGroup:
    peers = sorted(each.peer_id for each in (signer, *others))
    group = Group(
        run=RUN,
        step=1,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=peer) for peer in peers),
        reduce_s=1.0,
        vote_s=1.0,
    )
    return RunSignatures(identity=signer, network_id="test", run=RUN).sign_group(group, NOW)


def asked_for(shown: SignedGroup, digest: bytes) -> tuple[list[SignedGroup], Counting, int]:
    """Ask twice at the same time for the group with this digest, where the peer shows `shown`. Return the groups that
    were taken, and the number of calls."""
    taken, signatures, calls = list[SignedGroup](), Counting(), list[bytes]()

    async def call(_peer: str, _method: str, request: bytes, *, timeout_s: float) -> bytes:
        calls.append(GroupRequest.from_bytes(request).group_digest)
        return shown.data

    async def main() -> None:
        network = SimpleNamespace(call=call, now=lambda: NOW, peer_id=ME.peer_id)
        context = SimpleNamespace(network=network, methods=Methods(RUN), run=RUN, signatures=signatures)
        groups = groups_of(context, taken)
        both = (groups.ask(COORDINATOR.peer_id, digest, after_s=0.0) for _ in range(2))
        await asyncio.gather(*both)

    virtual_time.run(main())
    return taken, signatures, len(calls)


def test_group_that_a_stream_names_is_fetched_once_and_taken() -> None:
    group = signed_by(COORDINATOR, ME)
    taken, _, num_calls = asked_for(group, group.digest)
    assert [each.digest for each in taken] == [group.digest]
    assert num_calls == 1


def test_group_of_a_stranger_costs_no_signature_check() -> None:
    """It may hold hundreds of signatures, and anyone can make one."""
    group = signed_by(STRANGER, ME, COORDINATOR)
    taken, signatures, num_calls = asked_for(group, group.digest)
    assert (taken, signatures.num_read, num_calls) == ([], 0, 1)


@pytest.mark.parametrize("others", [(STRANGER,), (ME,)], ids=["without this member", "of another digest"])
def test_group_of_other_members_or_another_digest_is_not_taken(others: tuple[Identity, ...]) -> None:
    group = signed_by(COORDINATOR, *others)
    taken, _, _ = asked_for(group, bytes(32) if ME in others else group.digest)
    assert not taken


@pytest.mark.parametrize(
    ("roster", "group", "is_asked"),
    [
        ((STRANGER,), (), True),
        ((ME,), (ME, STRANGER), True),
        ((ME,), (ME,), False),
    ],
    ids=["member of the roster", "newcomer of the group", "stranger"],
)
def test_only_peers_of_the_roster_or_the_group_are_asked_for_the_groups_that_they_name(
    roster: tuple[Identity, ...], group: tuple[Identity, ...], is_asked: bool
) -> None:
    groups, accepted = MagicMock(), list[str]()  # it contains nothing

    async def accept(peer: str, _opening: object, _stream: object) -> None:
        accepted.append(peer)

    driver = SimpleNamespace(
        setup=SimpleNamespace(roster=tuple(each.peer_id for each in roster)),
        group=tuple(each.peer_id for each in group),
        groups=groups,
        reductions=SimpleNamespace(accept=accept),
        state=SimpleNamespace(known=()),
        start=MagicMock(),
    )
    opening = SimpleNamespace(group_digest=bytes(32))
    asyncio.run(RoundDriver.serve_part(cast(Any, driver), STRANGER.peer_id, cast(Any, opening), MagicMock()))
    assert groups.ask.called is is_asked
    assert accepted == [STRANGER.peer_id], "its stream is served in any case, once the group is here"


def test_group_that_resumes_an_outcome_is_not_kept_when_its_lock_is_made_up() -> None:
    """Members do not audit what they resume: the lock shows that a quorum has."""
    signatures = RunSignatures(identity=ME, network_id="test", run=round_scripts.RUN)
    context = SimpleNamespace(
        signatures=SimpleNamespace(check_reports=Counting().check_reports, check_lock=signatures.check_lock)
    )
    groups, first = groups_of(context, []), round_scripts.signed()
    group = round_scripts.resuming(first, 1, round_scripts.COORDINATOR, round_scripts.ME)
    assert group.group.lock is not None
    with pytest.raises(IntegrityError, match="signature"):
        groups.check(group)
    assert group.digest not in groups


def test_group_that_resumes_an_outcome_is_not_kept_when_its_origin_has_a_report_that_a_member_did_not_sign() -> None:
    """It could say that a member leaves, which does not: the next state would no longer depend on this member."""
    first = round_scripts.signed()
    group = round_scripts.resuming(first, 1, round_scripts.COORDINATOR, round_scripts.ME)

    def check_reports(signed: SignedGroup) -> None:
        if signed is group.origin:
            raise PeerViolation("its group has a report that a member did not sign", peer_id=signed.signer)

    signatures = SimpleNamespace(check_reports=check_reports, check_lock=MagicMock())
    groups = groups_of(SimpleNamespace(signatures=signatures), [])
    with pytest.raises(PeerViolation, match="did not sign"):
        groups.check(group)
    assert group.digest not in groups


def test_group_is_shown_to_a_node_that_names_its_digest() -> None:
    groups = groups_of(None, [])
    group = signed_by(COORDINATOR, ME)
    with pytest.raises(PeerRefused):
        groups.show(GroupRequest(run=RUN, group_digest=group.digest))
    groups.add(group)
    assert groups.show(GroupRequest(run=RUN, group_digest=group.digest)) == group.data


def test_groups_of_a_step_with_many_failed_attempts_are_bounded() -> None:
    groups = groups_of(None, [])
    signed = [signed_by(COORDINATOR, Identity(bytes([number]) * 32)) for number in range(10, 11 + MAX_GROUPS)]
    for each in signed:
        groups.add(each)
    assert [each.digest in groups for each in signed] == [False] + [True] * MAX_GROUPS


def test_member_gets_the_group_from_another_member_when_the_coordinator_withholds_it() -> None:
    withheld = list[int]()

    class Withholding(AlteredMember):
        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            reply = driver.reports.reply

            def keep_back(peer: str, answer: ReadyReply) -> None:
                others = [each for each in driver.setup.roster if each != context.network.peer_id]
                if answer.kind == "group" and others and peer == others[0]:
                    withheld.append(driver.setup.step)
                    return
                reply(peer, answer)

            driver.reports.reply = keep_back  # type: ignore[method-assign]
            return await super()._drive(driver, context)

    async def main() -> None:
        async with Swarm(config(min_group=4, outer_steps=NUM_STEPS)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=10_000))
            await swarm.join("withholding", kind=Withholding, inner=SyntheticInner(num_values=10_000))
            members = await swarm.finish()
            assert_equal_steps(members, NUM_STEPS)
            assert withheld, "the liar coordinated no step"
            for member in members:
                assert all(len(event.group) == 4 for event in member.of(OuterStep))

    virtual_time.run(main())
