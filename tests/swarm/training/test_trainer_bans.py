"""Tests that bans reach later members, restarted members and observers, and last as long as the run's rule says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from support.dashboard_world import trainer_record
from support.kept_evidence import KeptEvidence
from support.lying_owners import owner_that, times_minus_ten
from support.made_up_interval import LIARS, VALIDATED, VICTIM, accusation
from support.training_swarm import Member, Swarm, SyntheticInner, assert_equal_steps, config
from support.wrong_reduction import reduced, signatures
from swarm.network.interface import Stream
from swarm.network.membership import Membership
from swarm.testing import virtual_time
from swarm.training.evidence.bans import MAX_STRANGERS, Ban
from swarm.training.outside.observer import Observer
from swarm.training.run.methods import Methods
from swarm.training.state.certificate import RunSignatures
from swarm.training.trainer_events import MemberConvicted, OuterStep
from swarm_protocol.commit_messages import Outcome, Vote
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import Equivocation, StatedVote

pytestmark = pytest.mark.usefixtures("only_errors_logged")

WATCHER = Identity(b"w" * 32)
NAMES = ("m0", "m1", "m2")


def slow_inner() -> SyntheticInner:
    return SyntheticInner(num_values=6000, virtual_step_s=0.5)


@asynccontextmanager
async def convicting(steps: range = range(1, 99), **changes: object) -> AsyncIterator[tuple[Swarm, Member]]:
    """Run three honest members with one that lies in these `steps`, until all honest ones have convicted it."""
    async with Swarm(config(min_group=2, **{"outer_steps": 8, **changes})) as swarm:
        for name in NAMES:
            await swarm.join(name, inner=slow_inner())
        liar = await swarm.join("liar", kind=owner_that(times_minus_ten, steps), inner=slow_inner())
        async with asyncio.timeout(300):
            while not all(swarm.members[name].of(MemberConvicted) for name in NAMES):
                await asyncio.sleep(0.1)
        yield swarm, liar


def ban_of(member: Member) -> Ban:
    (ban,) = member.trainer.bans
    return ban


def test_late_member_asks_other_members_for_their_bans() -> None:
    """The liar has left, so that no group with it makes a member show the evidence."""

    async def main() -> None:
        async with convicting() as (swarm, liar):
            swarm.kill("liar")
            late = await swarm.join("late", inner=slow_inner())
            await swarm.finish(*NAMES, "late")
            (event,) = late.of(MemberConvicted)
            assert (event.peer_id, event.kind, event.until) == (liar.peer_id, "wrong_reduction", None)
            assert ban_of(late).data in {ban_of(swarm.members[name]).data for name in NAMES}

    virtual_time.run(main())


def test_restarted_member_remembers_the_peers_that_it_convicted() -> None:
    """It is alone, so that it cannot learn the ban from others."""

    async def main() -> None:
        async with convicting() as (swarm, liar):
            data, kept = ban_of(swarm.members["m0"]).data, KeptEvidence()
            await swarm.join("m9", inner=slow_inner(), evidence=kept)
            await swarm.finish(*NAMES, "m9")
            assert list(kept) == [liar.peer_id]
        async with Swarm(swarm.run.config) as alone:
            member = await alone.join(
                "m0", inner=slow_inner(), evidence=KeptEvidence({"liar": data, "nobody": b"nonsense"})
            )
            while not member.of(MemberConvicted):
                await asyncio.sleep(0.1)
            assert ban_of(member).verdict.peer_id == liar.peer_id

    virtual_time.run(main())


def test_banned_member_trains_again_after_the_runs_ban_steps() -> None:
    async def main() -> None:
        kept = KeptEvidence()
        async with Swarm(config(min_group=2, outer_steps=10, ban_steps=3)) as swarm:
            for name in NAMES:
                await swarm.join(name, inner=slow_inner(), evidence=kept if name == "m0" else None)
            liar = await swarm.join("liar", kind=owner_that(times_minus_ten, range(2, 3)), inner=slow_inner())
            members = await swarm.finish()
            assert_equal_steps(members, 10)
            first = swarm.members["m0"]
            (event,) = first.of(MemberConvicted)
            assert (event.peer_id, event.step, event.until) == (liar.peer_id, 2, 5)
            present = {step.step for step in first.of(OuterStep) if liar.peer_id in step.group}
            assert not present & {2, 3, 4, 5}
            assert max(present) > 5
            assert first.trainer.bans == ()
            assert kept == {}

    virtual_time.run(main())


@asynccontextmanager
async def observing(swarm: Swarm) -> AsyncIterator[Observer]:
    network = swarm.internet.network(WATCHER)
    async with Membership(network) as membership:
        yield Observer(network, membership, swarm.run)
    await network.close()


def test_observer_collects_evidence_and_checks_it() -> None:
    async def main() -> None:
        async with convicting() as (swarm, liar), observing(swarm) as observer:
            async with asyncio.timeout(60):
                while not (bans := await observer.look_for_bans(await observer.members())):
                    await asyncio.sleep(0.5)
            assert [ban.verdict.peer_id for ban in bans] == [liar.peer_id]
            assert await observer.look_for_bans({}) == bans

    virtual_time.run(main())


@pytest.mark.parametrize("shown", ["nonsense", "of another run", "without end"])
def test_observer_refuses_evidence_that_proves_nothing(shown: str) -> None:
    case = reduced()
    false = case.evidence(case.result()).evidence().to_bytes() if shown != "nonsense" else b"nonsense"
    asked = []

    async def main() -> None:
        async with Swarm(config(min_group=2)) as swarm, observing(swarm) as observer:
            hostile = swarm.internet.network(Identity(b"h" * 32))

            async def show(_peer: str, stream: Stream) -> None:
                asked.append(await stream.receive())
                await stream.send(false)
                while shown == "without end":
                    await stream.send(false)

            await hostile.serve_stream(Methods(swarm.run.run_id).bans, show)
            members = {hostile.peer_id: replace(trainer_record(), run=swarm.run.run_id)}
            for _ in range(2):
                assert await observer.look_for_bans(members) == ()
            await hostile.close()

    virtual_time.run(main())
    assert len(asked) == 1, "a member that showed invalid evidence was asked again"


def convicts_itself(number: int, run: str, step: int) -> bytes:
    """Return evidence of two votes signed by a key that belongs to no member."""
    signer = RunSignatures(identity=Identity(number.to_bytes(32, "big")), network_id="test", run=run)
    votes = (
        Vote(
            run=run,
            step=step,
            attempt=0,
            group_digest=bytes(32),
            outcome=Outcome(origin_digest=bytes(32), part_digests=(), state_digest=name * 32),
            kind="commit",
            state_digest=bytes(32),
        )
        for name in (b"o", b"p")
    )
    first, second = (StatedVote.of(signer.sign_vote(vote)).to_bytes() for vote in votes)
    peer = signer.identity.peer_id
    return Equivocation(statement="vote", peer=peer, first=first, second=second).evidence().to_bytes()


@pytest.mark.parametrize("finders", [LIARS, LIARS[:1]])
def test_observer_still_asks_a_member_that_showed_evidence_valid_only_for_those_who_were_present(
    finders: list[Identity],
) -> None:
    """A liar that does not vote could otherwise have observers ask no member any more."""
    only_there = accusation(tuple(LIARS), finders=tuple(finders), on_probation=(VICTIM,)).evidence().to_bytes()
    shown, asked = (only_there, convicts_itself(1, "run", 1)), list[bytes]()

    async def main() -> None:
        async with Swarm(config(min_group=2)) as swarm, observing(swarm) as observer:
            observer._reader = replace(observer._reader, signatures=signatures())
            observer.run = replace(observer.run, config=VALIDATED)
            member = swarm.internet.network(Identity(b"h" * 32))

            async def show(_peer: str, stream: Stream) -> None:
                asked.append(await stream.receive())
                for data in shown:
                    await stream.send(data)

            await member.serve_stream(Methods(swarm.run.run_id).bans, show)
            members = {member.peer_id: replace(trainer_record(), run=swarm.run.run_id)}
            for _ in range(2):
                (ban,) = await observer.look_for_bans(members)
                assert ban.verdict.kind == "equivocation"
            await member.close()

    virtual_time.run(main())
    assert len(asked) == 2


def test_observer_remembers_those_with_worthless_evidence_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer that has seen no step asks any peer that says that it trains the run."""
    monkeypatch.setattr("swarm.training.outside.observer.MAX_IGNORED", 2)

    async def show(_peer: str, stream: Stream) -> None:
        await stream.receive()
        await stream.send(b"nothing")

    async def main() -> None:
        async with Swarm(config(min_group=2)) as swarm, observing(swarm) as observer:
            run = swarm.run.run_id
            hostile = [swarm.internet.network(Identity(bytes([number]) * 32)) for number in range(200, 205)]
            for network in hostile:
                await network.serve_stream(Methods(run).bans, show)
            claims = {each.peer_id: replace(trainer_record(), run=run, outer_step=99) for each in hostile}
            for _ in hostile:
                assert await observer.look_for_bans(claims) == ()
            assert len(observer._ignored) == 2
            for network in hostile:
                await network.close()

    virtual_time.run(main())


def test_observer_asks_no_strangers_and_takes_few_bans_about_them_and_none_about_future_steps() -> None:
    """Anyone can make keys that convict themselves. Without a bound, the newest of these bans would displace those of
    members."""
    asked = set[str]()

    async def main() -> None:
        async with Swarm(config(min_group=2)) as swarm, observing(swarm) as observer:
            await swarm.join("a")
            await swarm.join("b")
            await swarm.finish()
            run = swarm.run.run_id
            false = [convicts_itself(number, run, 1 + number % 2 * 2**30) for number in range(1, 100)]

            async def show(_peer: str, stream: Stream, *, of: str) -> None:
                asked.add(of)
                await stream.receive()
                for data in false:
                    await stream.send(data)

            hostile = [swarm.internet.network(Identity(bytes([number]) * 32)) for number in range(200, 220)]
            for network in hostile:
                await network.serve_stream(Methods(run).bans, partial(show, of=network.peer_id))
            claims = {each.peer_id: replace(trainer_record(), run=run, outer_step=99) for each in hostile}
            members = dict(await observer.members())
            await observer.look(members)
            assert set(observer.roster) == set(members)
            for _ in range(4):
                assert await observer.look_for_bans(claims | members) == ()
            assert not asked
            lying = swarm.members["a"].network
            lying.release(Methods(run).bans)
            await lying.serve_stream(Methods(run).bans, partial(show, of=lying.peer_id))
            bans = await observer.look_for_bans({lying.peer_id: members[lying.peer_id]})
            assert (len(bans), {ban.verdict.step for ban in bans}) == (MAX_STRANGERS, {1})
            for network in hostile:
                await network.close()

    virtual_time.run(main())
