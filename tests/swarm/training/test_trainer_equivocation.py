"""Tests that members which sign two statements about one attempt are banned, and that honest members never do, however
they crash."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pytest
from support.faults import Fault, FaultScript
from support.training_swarm import (
    PHASES,
    AlteredMember,
    Member,
    Swarm,
    SyntheticInner,
    assert_equal_steps,
    config,
    identity_of,
)
from swarm.network.memory.memory_link import LinkModel
from swarm.testing import virtual_time
from swarm.training.evidence.equivocation import Statement, statement_of_group, statement_of_report, statement_of_vote
from swarm.training.member.peer_calls import send_vote
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember
from swarm.training.round.promise import PromiseFile
from swarm.training.round.round_events import Action, CastVote
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import MemberConvicted, RoundAborted
from swarm_protocol.commit_messages import Vote
from swarm_protocol.proof_messages import StatedReport, StatedVote
from swarm_protocol.training_messages import Group, Ready, SignedGroup

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NAMES = ("m0", "m1", "m2")


Tells: TypeAlias = Callable[[Vote, Vote, tuple[str, ...]], list[tuple[Vote, tuple[str, ...]]]]
"""Decides which peer gets which of a liar's two votes."""


def slow_inner() -> SyntheticInner:
    return SyntheticInner(virtual_step_s=0.5)


def voter_that(tells: Tells) -> type[RunMember]:
    """Return a kind of member that signs a second vote beside each of its own."""

    class Liar(AlteredMember):
        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            async def cast(action: CastVote) -> None:
                outcome = replace(action.vote.outcome, state_digest=b"forked".ljust(32))
                own = context.signatures.sign_vote(action.vote)
                other = context.signatures.sign_vote(replace(action.vote, outcome=outcome))
                for vote, peers in tells(own, other, action.peers):
                    for peer in peers:
                        driver.background.create_task(send_vote(driver, peer, vote.to_bytes(), vote.attempt))

            async def act(action: Action) -> None:
                await (cast(action) if isinstance(action, CastVote) else honest(action))

            honest, driver._act = driver._act, act  # type: ignore[method-assign]
            return await super()._drive(driver, context)

    return Liar


def both_to_all(own: Vote, other: Vote, peers: tuple[str, ...]) -> list[tuple[Vote, tuple[str, ...]]]:
    return [(own, peers), (other, peers)]


def one_to_each_half(own: Vote, other: Vote, peers: tuple[str, ...]) -> list[tuple[Vote, tuple[str, ...]]]:
    return [(own, peers[:-1]), (other, peers[-1:])]


async def run_with_voter(tells: Tells, *, latency_s: float) -> list[Member]:
    """Return three members, 5 ms from each other, that have finished beside a liar at a distance of `latency_s`."""
    async with Swarm(config(min_group=2, outer_steps=8), link=LinkModel(latency_s=0.005)) as swarm:
        for name in NAMES:
            member = await swarm.join(name, inner=slow_inner())
            swarm.internet.link(identity_of("liar").peer_id, member.peer_id, LinkModel(latency_s=latency_s))
        await swarm.join("liar", kind=voter_that(tells), inner=slow_inner())
        members = await swarm.finish(*NAMES)
        assert_equal_steps(members, 8)
        return members


@pytest.mark.parametrize(
    ("tells", "latency_s"),
    [(both_to_all, 0.004), (both_to_all, 0.006), (one_to_each_half, 0.001), (one_to_each_half, 0.004)],
    ids=["to all, early", "to all, late", "to each half another, far earlier", "to each half another, early"],
)
def test_member_that_votes_twice_is_banned_by_all(tells: Tells, latency_s: float) -> None:
    """A member that received only one of the two votes finds the other one in certificates that others show."""

    async def main() -> None:
        for member in await run_with_voter(tells, latency_s=latency_s):
            (event,) = member.of(MemberConvicted)
            assert (event.peer_id, event.kind) == (identity_of("liar").peer_id, "equivocation")
            assert "two different votes" in event.reason

    virtual_time.run(main())


def test_two_votes_to_two_halves_that_decide_nothing_go_unnoticed_and_cost_no_attempt() -> None:
    """They arrive when the votes of the others have decided, so that no lock or certificate shows them."""

    async def main() -> None:
        for member in await run_with_voter(one_to_each_half, latency_s=0.006):
            assert not member.of(MemberConvicted)
            assert not member.of(RoundAborted)

    virtual_time.run(main())


# --- honest members that crash ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder(RunSignatures):
    """Note everything that its member signs about attempts."""

    name: str
    said: dict[object, set[bytes]]

    def sign_vote(self, vote: Vote) -> Vote:
        signed = RunSignatures.sign_vote(self, vote)
        self._note("vote", statement_of_vote(StatedVote.of(signed)))
        return signed

    def sign_report(self, ready: Ready) -> Ready:
        signed = RunSignatures.sign_report(self, ready)
        self._note_report(signed, ready.sequence, signed.contribution_of(self.identity.peer_id))
        return signed

    def sign_group(self, group: Group, now: float, sequence: int = 0) -> SignedGroup:
        signed = RunSignatures.sign_group(self, group, now, sequence)
        self._note("group", statement_of_group(signed.group))
        own = next(each for each in signed.group.members if each.peer_id == self.identity.peer_id)
        self._note_report(group, sequence, own)
        return signed

    def _note_report(self, place: Ready | Group, sequence: int, report: object) -> None:
        stated = StatedReport(
            step=place.step,
            attempt=place.attempt,
            state_digest=place.state_digest,
            sequence=sequence,
            report=report,  # type: ignore[arg-type]
        )
        self._note("report", statement_of_report(stated))

    def _note(self, kind: str, statement: Statement) -> None:
        self.said[self.name, kind, statement.topic, statement.attempted].add(statement.content)


NUM_STEPS = 3
"""The first or the second is struck, and the last one shows that the run goes on."""


def recorded(name: str, said: dict[object, set[bytes]]) -> type[RunMember]:
    class Recorded(RunMember):
        async def _open_context(self) -> RunContext:
            context = await super()._open_context()
            honest = context.signatures
            names = ("identity", "network_id", "run", "succession", "last_step", "admission", "author")
            recorder = Recorder(**{each: getattr(honest, each) for each in names}, said=said, name=name)
            return replace(context, signatures=recorder)

    return Recorded


def said_by_one_that_crashes(
    phase: str, nth: int, promises: Callable[[str], PromiseFile | None]
) -> tuple[dict[object, set[bytes]], list[Member]]:
    """Return everything that members have signed in a run in which one of them is killed at `phase` and restarted at
    once."""
    said: dict[object, set[bytes]] = defaultdict(set)
    killed = list[str]()

    async def main() -> list[Member]:
        swarms = list[Swarm]()

        def kill(who: str) -> None:
            killed.append(who)
            swarms[0].kill(who)

        script = FaultScript([Fault(who="*", phase=phase, what="kill", nth=nth)], kill=kill)
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS, majority_after_s=0.0), script) as swarm:
            swarms.append(swarm)
            for name in NAMES:
                await swarm.join(name, inner=slow_inner(), kind=recorded(name, said), promises=promises(name))
            async with asyncio.timeout(300):
                await script.until_all_fired()
            await _start_again(swarm, killed[0], recorded(killed[0], said), promises(killed[0]))
            members = await swarm.finish(*NAMES)
        script.assert_all_fired()
        return members

    return said, virtual_time.run(main())


async def _start_again(swarm: Swarm, name: str, kind: type[RunMember], promises: PromiseFile | None) -> None:
    first = swarm.members[name]
    state, certificate = first.trainer.state, first.trainer.certificate
    assert first.task is not None
    await asyncio.wait({first.task})
    await first.trainer.close()
    await first.network.close()
    # this time it trains other values, so that it would sign other statements
    inner = SyntheticInner(virtual_step_s=0.4, corrupt=lambda x_N: 1.01 * x_N)
    kept = {"state": state, "certificate": certificate} if certificate else {}
    await swarm.join(name, inner=inner, kind=kind, promises=promises, **kept)  # type: ignore[arg-type]


@pytest.mark.parametrize(("phase", "nth"), [(phase, (1, 4)[index % 2]) for index, phase in enumerate(PHASES)])
def test_honest_member_never_signs_two_statements_when_it_crashes_at_any_phase(
    phase: str, nth: int, tmp_path: Path
) -> None:
    said, members = said_by_one_that_crashes(phase, nth, lambda name: PromiseFile(tmp_path / name))
    assert {len(each) for each in said.values()} == {1}
    assert not any(member.of(MemberConvicted) for member in members)
    assert_equal_steps(members, NUM_STEPS)
