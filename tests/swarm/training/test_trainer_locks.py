"""Tests whole trainers with one liar of four: it gets no second state of a step, and no part sizes or seats of its
choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.training_swarm import NUM_VALUES, Member, Swarm, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.allreduce.parts import part_sizes
from swarm.training.member.run_member import RunMember
from swarm.training.round.clusters import drawn
from swarm.training.round.group_members import form_group
from swarm.training.round.quorum import Succession
from swarm.training.round.round_state import RoundSetup, attempt_beacon
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import OuterStep, RoundAborted
from swarm_protocol.commit_messages import Vote
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Group, Ready, SignedGroup, SliceCommitment

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NUM_STEPS = 4
Change = Callable[[Group, str], Group]
"""Return the group that a coordinator, the second argument, signs in place of the one that it formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LyingSignatures(RunSignatures):
    """Sign another group than the one that the member formed. `signed` has those that differ."""

    change: Change
    signed: list[Group]

    def sign_group(self, group: Group, now: float, sequence: int = 0) -> SignedGroup:
        other = self.change(group, self.identity.peer_id)
        if other != group:
            self.signed.append(other)
        return RunSignatures.sign_group(self, other, now, sequence)


def liar_that(change: Change, signed: list[Group]) -> type[RunMember]:
    class Liar(RunMember):
        async def _open_context(self) -> RunContext:
            context = await super()._open_context()
            honest = context.signatures
            lying = LyingSignatures(
                identity=honest.identity,
                network_id=honest.network_id,
                run=honest.run,
                succession=honest.succession,
                author=honest.author,
                change=change,
                signed=signed,
            )
            return replace(context, signatures=lying)

    return Liar


async def join_with(swarm: Swarm, liar: type[RunMember]) -> list[Member]:
    """Start three honest members and the liar, and return the honest ones."""
    honest = [await swarm.join(f"m{index}") for index in range(3)]
    await swarm.join("liar", kind=liar)
    return honest


def forget_locks(group: Group, _me: str) -> Group:
    """Ignore all reported locks and make a new outcome."""
    if group.lock is None:
        return group
    members = tuple(replace(member, locked=None) for member in group.members)
    return replace(group, members=members, lock=None, origin=b"", part_values=part_sizes(NUM_VALUES, members))


def test_one_liar_of_four_makes_no_second_certificate_during_a_partition() -> None:
    """The liar alone sees enough commit votes of step 2 for a certificate. When it coordinates, it ignores the locks
    behind them, and a member that voted is cut off from the others for a while."""
    ignored, commit_votes = list[Group](), dict[str, Vote]()

    async def main() -> None:
        run = config(min_group=2, outer_steps=NUM_STEPS, majority_after_s=0.0)
        async with Swarm(run) as swarm:
            honest = await join_with(swarm, liar_that(forget_locks, ignored))
            for member in honest:
                member.network.call = _losing(member, commit_votes, ignored)  # type: ignore[method-assign]
            async with asyncio.timeout(300.0):
                while len(commit_votes) < 2:
                    await asyncio.sleep(0.01)
                outcomes = {vote.outcome for vote in commit_votes.values()}
                while not ignored:
                    await asyncio.sleep(0.01)
            swarm.internet.partition([[next(iter(commit_votes))]])
            await asyncio.sleep(20.0)
            swarm.internet.heal()
            members = await swarm.finish("m0", "m1", "m2")
            assert_equal_steps(members, NUM_STEPS)
            assert len(outcomes) == 1
            (decided,) = outcomes
            digests = {each.digest for member in members for each in member.of(OuterStep) if each.step == 2}
            assert digests == {decided.state_digest.hex()}
            reasons = [event.reason for member in members for event in member.of(RoundAborted)]
            assert any("did not sign" in reason for reason in reasons), reasons

    virtual_time.run(main())


def _losing(member: Member, commit_votes: dict[str, Vote], ignored: list[Group]) -> Any:
    """Return a `call` of `member` that loses its commit votes of step 2, until the liar has ignored a lock."""
    honest = member.network.call

    async def call(peer_id: str, method: str, request: bytes, **bounds: Any) -> bytes:
        if method.startswith("train.vote") and not ignored:
            vote = Vote.from_bytes(request)
            if (vote.step, vote.kind) == (2, "commit"):
                commit_votes[member.peer_id] = vote
                return b""
        return await honest(peer_id, method, request, **bounds)

    return call


def take_all(group: Group, me: str) -> Group:
    """Claim the whole vector, against the bandwidths."""
    if not group.part_values:
        return group
    return replace(group, part_values=tuple(group.num_values * (peer == me) for peer in group.peer_ids))


def slow_others_down(group: Group, me: str) -> Group:
    """Claim most of the vector by changing the others' reported bandwidths."""
    if not group.part_values:
        return group
    members = tuple(replace(member, bytes_per_s=10**9 if member.peer_id == me else 1000) for member in group.members)
    return replace(group, members=members, part_values=part_sizes(group.num_values, members))


def weigh_more(group: Group, _me: str) -> Group:
    """Halve the weight of all members."""
    if not group.part_values:
        return group
    members = tuple(replace(member, num_tokens=member.num_tokens // 2) for member in group.members)
    return replace(group, members=members)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (take_all, "do not follow from the bandwidths"),
        (slow_others_down, "did not sign"),
        (weigh_more, "did not sign"),
    ],
)
def test_coordinator_that_changes_reports_or_part_sizes_is_refused_and_named(change: Change, words: str) -> None:
    signed = list[Group]()

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=100)) as swarm:
            honest = await join_with(swarm, liar_that(change, signed))
            async with asyncio.timeout(300.0):
                while not any(words in each.reason for member in honest for each in member.of(RoundAborted)):
                    await asyncio.sleep(0.01)
                num_steps = len(honest[0].of(OuterStep)) + 2
                while any(len(member.of(OuterStep)) < num_steps for member in honest):
                    await asyncio.sleep(0.01)
            assert signed
            states = {(each.step, each.digest) for member in honest for each in member.of(OuterStep)}
            assert len(states) == len({step for step, _ in states})

    virtual_time.run(main())


def test_twelve_keys_ground_for_low_hashes_get_only_their_share_of_the_seats() -> None:
    """They were ground for this state and attempt, among 2,000 keys. Members of the state keep their seats. The seats
    of newcomers follow from the members' commitments, which nobody knew when the keys were made."""
    roster = tuple(sorted(Identity(bytes([90 + number]) * 32).peer_id for number in range(8)))
    newcomers = [Identity(bytes([140 + number]) * 32).peer_id for number in range(12)]
    beacon = attempt_beacon("run", bytes(32), 5, 0)
    keys = (Identity(number.to_bytes(32, "big")).peer_id for number in range(1, 2000))
    ground = sorted(keys, key=lambda peer: drawn(beacon, peer))[:12]
    assert max(drawn(beacon, peer) for peer in ground) < min(drawn(beacon, peer) for peer in newcomers)
    setup = seats_of(roster)
    taken = 0
    for trial in range(20):
        reports = {peer: report(bytes([trial, place]) * 16) for place, peer in enumerate(roster)}
        reports |= {peer: report() for peer in (*ground, *newcomers)}
        group, _ = form_group(setup, 0, reports)
        assert set(roster) <= set(group.peer_ids)
        assert len(group.members) == 16
        taken += len(set(ground) & set(group.peer_ids))
    assert 60 <= taken <= 100, (
        "the ground keys must get about half of the 160 seats that are left, as many as the other newcomers"
    )


def seats_of(roster: tuple[str, ...]) -> RoundSetup:
    return RoundSetup(
        run="run",
        me=roster[0],
        step=5,
        first_attempt=0,
        state_digest=bytes(32),
        roster=roster,
        leased=roster,
        admission=(),
        succession=Succession.of(config(min_group=2)),
        max_group=16,
        samples_per_member=10,
        tokens_per_sample=4,
        num_values=10_000,
        grace_s=1.0,
        reduce_s=20.0,
        vote_s=10.0,
    )


def report(root: bytes = b"") -> Ready:
    """Return the report of a member that has committed to `root`, or of a newcomer, which has done nothing."""
    commitment = SliceCommitment(root=root, signature=bytes(64)) if root else None
    work = {"num_tokens": 40, "num_samples": 10} if root else {}
    return Ready(run="run", step=5, attempt=0, state_digest=bytes(32), commitment=commitment, **work)
