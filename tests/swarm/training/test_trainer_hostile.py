"""Tests runs with members that lie or disrupt rounds: the others name them, go on without them, and end with one
state."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from support.training_swarm import (
    NUM_VALUES,
    AlteredMember,
    Member,
    SpoiledCodec,
    Swarm,
    SyntheticInner,
    assert_equal_steps,
    config,
    placed_votes,
)
from swarm.network.memory.memory_network import MemoryNetwork
from swarm.testing import virtual_time
from swarm.training.allreduce import audit
from swarm.training.allreduce.part_reduction import PartOwner
from swarm.training.allreduce.parts import part_sizes
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.member.interval_loop import IntervalLoop
from swarm.training.member.outer_steps import OuterSteps
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember
from swarm.training.member.shown_groups import ShownGroups
from swarm.training.round.round_events import Action, Event, Grouped, Sign
from swarm.training.run.methods import Methods
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import Admitted, IntervalDone, MemberConvicted, OuterStep, RoundAborted
from swarm_compression import get_codec
from swarm_protocol.commit_messages import Abort, Lock, Outcome, Vote
from swarm_protocol.errors import ConfigError, PeerViolation, RoundError, SwarmError
from swarm_protocol.identity import Identity, short_id
from swarm_protocol.member_messages import StandingRequest
from swarm_protocol.reduction_messages import ReduceOpening
from swarm_protocol.training_messages import Group, Ready, ReadyReply, SignedGroup

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NUM_STEPS = 3


def assert_honest_go_on(members: list[Member], liar: Member | None = None) -> None:
    """Assert that the members finish with one state, and without the liar once it is known."""
    assert_equal_steps(members, NUM_STEPS)
    if liar is not None:
        assert liar.peer_id not in members[0].of(OuterStep)[-1].group
        reasons = [event.reason for member in members for event in member.of(RoundAborted)]
        assert any(short_id(liar.peer_id) in reason for reason in reasons), reasons


async def run_with_liar(kind: type[RunMember], *, inner: SyntheticInner | None = None) -> tuple[list[Member], Member]:
    async with Swarm(config(min_group=3, outer_steps=NUM_STEPS)) as swarm:
        for index in range(3):
            await swarm.join(f"m{index}")
        liar = await swarm.join("liar", kind=kind, inner=inner)
        return await swarm.finish("m0", "m1", "m2"), liar


NAN = torch.tensor([math.nan]).numpy().tobytes()
INF = torch.tensor([math.inf]).numpy().tobytes()
HUGE = torch.tensor([2.0**100]).numpy().tobytes()


def in_codec(name: str, data: bytes) -> bytes:
    """Return the values of the int8 `data`, encoded by another codec."""
    int8 = get_codec("int8")
    num_values = next(number for number in range(NUM_VALUES + 1) if int8.encoded_bytes(number) == len(data))
    return get_codec(name).encode(int8.decode(data, num_values))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: NAN + data[4:],
        lambda data: INF + data[4:],
        lambda data: HUGE + data[4:],
        lambda data: data[:-1],
        lambda data: data + b"x",
        partial(in_codec, "fp16"),
        partial(in_codec, "int4"),
    ],
    ids=["nan", "inf", "huge", "short", "long", "fp16", "int4"],
)
def test_sender_of_bad_slices_and_results_is_named_and_left_out(spoil: Callable[[bytes], bytes]) -> None:
    class Liar(RunMember):
        async def _open_context(self) -> RunContext:
            return replace(await super()._open_context(), codec=SpoiledCodec(spoil))

    async def main() -> None:
        members, liar = await run_with_liar(Liar)
        assert_honest_go_on(members, liar)
        for member in members:
            assert all(torch.isfinite(member.trainer.state.theta_N)) if member.trainer.state else False

    virtual_time.run(main())


def test_member_that_refuses_every_reduction_stream_costs_at_most_three_attempts_a_step() -> None:
    """It breaks no rule: it reports ready each time, and answers each slice with a harmless error. Its backup then
    makes its part, unless the backup asks for its slices before they have arrived. That is one member's word against
    another's, so that either of them or none may be left out of the next attempts."""

    class Spoiler(RunMember):
        async def _open(self) -> OuterSteps:
            steps = await super()._open()
            context = steps.context

            async def spoil(*_: object) -> None:
                spoiled.append(1)
                raise RoundError("this member takes no part")

            context.network.release(Methods(context.run).reduce)
            await context.network.serve_stream(Methods(context.run).reduce, spoil)
            return steps

    spoiled: list[int] = []

    async def main() -> None:
        members, _ = await run_with_liar(Spoiler)
        assert spoiled
        assert_equal_steps(members, NUM_STEPS)
        for member in members:
            aborted = [event.step for event in member.of(RoundAborted)]
            assert all(aborted.count(step) <= 3 for step in aborted)

    virtual_time.run(main())


class Quitter(AlteredMember):
    """Report ready each time, and announce that it leaves as soon as there is a group. It blames those of the others
    for this that `accused` returns, from these and the attempt. `left` has the groups that it has left."""

    context: RunContext
    left: set[bytes]

    @staticmethod
    def accused(_others: list[str], _attempt: int) -> tuple[str, ...]:
        return ()

    async def _open_context(self) -> RunContext:
        self.context, self.left = await super()._open_context(), set()
        return self.context

    async def _take_step(self, intervals: IntervalLoop, background: asyncio.TaskGroup) -> bool:
        assert self._steps is not None
        service = self._steps.service
        set_driver = service.set_driver

        def listen(driver: RoundDriver | None) -> None:
            set_driver(driver)
            if driver is not None:
                events = driver.events
                put = events.put_nowait
                events.put_nowait = lambda event: (self._leave_group(event, background), put(event))[1]  # type: ignore[method-assign]

        service.set_driver = listen  # type: ignore[method-assign]
        try:
            return await super()._take_step(intervals, background)
        finally:
            service.set_driver = set_driver  # type: ignore[method-assign]

    def _leave_group(self, event: Event, tasks: asyncio.TaskGroup) -> None:
        if not isinstance(event, Grouped) or not event.signed.group.part_values or event.signed.digest in self.left:
            return
        group = event.signed.group
        self.left.add(event.signed.digest)
        others = [peer for peer in group.peer_ids if peer != self.context.network.peer_id]
        abort = Abort(
            run=group.run,
            step=group.step,
            attempt=group.attempt,
            group_digest=event.signed.digest,
            reason="tired",
            accused=self.accused(others, group.attempt),
        )
        tasks.create_task(self._tell(abort, others))

    async def _tell(self, abort: Abort, peers: list[str]) -> None:
        for peer in peers:
            with suppress(SwarmError):
                await self.context.network.call(peer, self.context.methods.abort, abort.to_bytes(), timeout_s=1.0)


class AccusingQuitter(Quitter):
    """Blame another one each time."""

    @staticmethod
    def accused(others: list[str], attempt: int) -> tuple[str, ...]:
        return (others[attempt % len(others)],)


class PersistentQuitter(Quitter):
    """Blame the same one each time, as a member does that cannot reach it."""

    @staticmethod
    def accused(others: list[str], _attempt: int) -> tuple[str, ...]:
        return (others[0],)


async def finished_beside(kind: type[Quitter]) -> list[Member]:
    """Return three members that have made all steps beside one of this kind."""
    # the run's id draws the coordinators; if the quitter is drawn itself, that can cost another attempt
    async with Swarm(config(name="b", min_group=2, outer_steps=NUM_STEPS)) as swarm:
        # rounds take long enough for it to leave before they end
        for index in range(3):
            await swarm.join(f"m{index}", inner=SyntheticInner(num_values=40_000))
        quitter = await swarm.join("quitter", kind=kind, inner=SyntheticInner(num_values=40_000))
        members = await swarm.finish("m0", "m1", "m2")
        assert isinstance(quitter.trainer, Quitter)
        assert quitter.trainer.left
        assert all(member.of(RoundAborted) for member in members)
        assert_equal_steps(members, NUM_STEPS)
        return members


@pytest.mark.parametrize("kind", [Quitter, AccusingQuitter, PersistentQuitter])
def test_member_that_leaves_each_group_costs_at_most_two_attempts_a_step(kind: type[Quitter]) -> None:
    async def main() -> None:
        for member in await finished_beside(kind):
            assert len(member.of(RoundAborted)) <= 2 * NUM_STEPS

    virtual_time.run(main(), compute_s=lambda _: 0.01)


class QuitterWithVote(Quitter):
    """Vote first for an outcome with `num_parts` parts, which its group cannot have."""

    num_parts = 0

    async def _tell(self, abort: Abort, peers: list[str]) -> None:
        context = self.context
        assert self._steps is not None
        driver = self._steps.service.driver
        assert driver is not None
        signed = driver.state.signed
        assert signed is not None
        outcome = await self._outcome(driver, signed, abort.group_digest)
        vote = context.signatures.sign_vote(signed.vote(outcome, "prepare"))
        for peer in peers:
            with suppress(SwarmError):
                await context.network.call(peer, context.methods.vote, vote.to_bytes(), timeout_s=1.0)
        await super()._tell(abort, peers)

    async def _outcome(self, _driver: RoundDriver, signed: SignedGroup, digest: bytes) -> Outcome:
        context = self.context
        made_up = await context.replica.propose(context.executor, digest, signed.group, ())
        return replace(made_up, part_digests=(bytes(32),) * self.num_parts)


class QuitterWithManyParts(QuitterWithVote):
    num_parts = 200


@pytest.mark.parametrize("kind", [QuitterWithVote, QuitterWithManyParts])
def test_vote_for_an_impossible_outcome_of_its_group_does_not_count(kind: type[QuitterWithVote]) -> None:
    """Otherwise all members would fetch its parts and vote for it, which gives a certificate that nobody accepts, not
    even they themselves."""
    virtual_time.run(finished_beside(kind), compute_s=lambda _: 0.01)


class QuitterWithMadeUpPart(QuitterWithVote):
    """Keep its own part back, vote for an outcome with a made-up part of another member, show its parts on request, and
    leave the group. `made_up` has the digests of the made-up parts."""

    made_up: set[bytes]

    async def _open_context(self) -> RunContext:
        self.made_up = set()
        return await super()._open_context()

    async def _outcome(self, driver: RoundDriver, signed: SignedGroup, digest: bytes) -> Outcome:
        context = self.context
        await asyncio.sleep(1.0)  # until it has the parts of the others
        butterfly = driver.reductions._reductions[digest].butterfly
        parts = [bytes(part.data) for part in butterfly._parts]
        victim = next(part for part, peer in enumerate(signed.group.peer_ids) if peer != context.network.peer_id)
        parts[victim] = bytes(len(parts[victim]))
        self.made_up.add(hashlib.sha256(parts[victim]).digest())
        outcome = await context.replica.propose(context.executor, digest, signed.group, tuple(parts))
        context.replica.parts_of = lambda _: tuple(parts)  # type: ignore[method-assign]
        return outcome


class QuitterWithUndecodablePart(QuitterWithMadeUpPart):
    """The made-up part is its own, which no other member has, and no encoder writes such bytes."""

    async def _outcome(self, driver: RoundDriver, signed: SignedGroup, digest: bytes) -> Outcome:
        context = self.context
        await asyncio.sleep(1.0)  # until it has the parts of the others
        butterfly = driver.reductions._reductions[digest].butterfly
        parts = [bytes(part.data) for part in butterfly._parts]
        mine = signed.group.peer_ids.index(context.network.peer_id)
        parts[mine] = b"\xff" * len(parts[mine])
        digests = tuple(hashlib.sha256(part).digest() for part in parts)
        self.made_up.add(digests[mine])
        outcome = await context.replica.propose(context.executor, digest, signed.group, ())
        context.replica.parts_of = lambda _: tuple(parts)  # type: ignore[method-assign]
        return replace(outcome, part_digests=digests)


@pytest.mark.parametrize("kind", [QuitterWithMadeUpPart, QuitterWithUndecodablePart])
@pytest.mark.parametrize("is_audited", [True, False])
def test_vote_for_a_made_up_part_convinces_nobody_and_has_no_honest_owner_accused(
    kind: type[QuitterWithMadeUpPart], is_audited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large group most members audit other parts. Without `is_audited`, nobody audits any part."""
    if not is_audited:
        monkeypatch.setattr(audit, "audit_plan", lambda *_: {})
    liars: list[str] = []

    async def withhold(owner: PartOwner) -> None:
        await (asyncio.get_running_loop().create_future() if owner._streams.me in liars else hand_out(owner))

    hand_out = PartOwner.hand_out
    monkeypatch.setattr(PartOwner, "hand_out", withhold)

    async def main() -> None:
        async with Swarm(config(name="b", min_group=2, outer_steps=1)) as swarm:
            names = [f"m{index}" for index in range(3)]
            for name in names:
                await swarm.join(name, inner=SyntheticInner(num_values=100_000))
            quitter = await swarm.join("quitter", kind=kind, inner=SyntheticInner(num_values=100_000))
            liars.append(quitter.peer_id)
            members = await swarm.finish(*names)
            assert isinstance(quitter.trainer, QuitterWithMadeUpPart)
            assert quitter.trainer.made_up
            assert_equal_steps(members, 1)
            for member in members:
                assert member.trainer._steps is not None
                assert member.trainer.replica is not None
                assert not member.trainer._steps._accused.keys() - {quitter.peer_id}
                for link in member.trainer.replica.history.since(1):
                    assert quitter.trainer.made_up.isdisjoint(link.outcome.part_digests)

    virtual_time.run(main(), compute_s=lambda _: 0.01)


@pytest.mark.parametrize("puts_off", [False, True])
@pytest.mark.parametrize(("name", "step"), [("withholds", 1), ("silent", 2)], ids=["the first group", "a later group"])
def test_coordinator_that_never_signs_a_group_costs_only_its_attempt(name: str, step: int, puts_off: bool) -> None:
    """The run's id draws the coordinators, and with it the step in which the liar is one."""
    withheld: list[int] = []

    class Withholder(AlteredMember):
        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            act, report = driver._act, driver.reports.take

            async def act_but_sign(action: Action) -> None:
                if isinstance(action, Sign):
                    withheld.append(driver.setup.step)
                    await asyncio.Event().wait()
                await act(action)

            async def put_off(peer: str, ready: Ready) -> ReadyReply:
                reply = await report(peer, ready)  # `pending` once it has stopped signing
                return ReadyReply(kind="left_out", reason="later") if puts_off and withheld else reply

            driver._act, driver.reports.take = act_but_sign, put_off  # type: ignore[method-assign]
            return await super()._drive(driver, context)

    async def main() -> None:
        async with Swarm(config(name=name, min_group=3, outer_steps=4)) as swarm:
            for index in range(4):
                await swarm.join(f"m{index}")
            liar = await swarm.join("liar", kind=Withholder)
            members = await swarm.finish("m0", "m1", "m2", "m3")
            assert withheld == [step]
            assert_equal_steps(members, 4)
            for member in members:
                reasons = {event.reason for event in member.of(RoundAborted) if "left out: later" not in event.reason}
                assert any(short_id(liar.peer_id) in reason for reason in reasons), reasons
                assert not member.of(MemberConvicted)

    virtual_time.run(main())


def test_coordinator_that_hurries_all_before_their_first_step_and_never_signs_costs_only_its_attempt() -> None:
    """A member without any work does not go on to the next attempt, so a hurried interval takes one step."""
    withheld: list[int] = []

    class Hurrying(AlteredMember):
        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            act = driver._act

            async def act_but_sign(action: Action) -> None:
                if isinstance(action, Sign) and driver.setup.roster:
                    withheld.append(driver.setup.step)
                    await asyncio.Event().wait()
                await act(action)

            async def hurry() -> None:
                while driver.setup.step not in withheld:
                    request = StandingRequest(
                        run=context.run, step=driver.setup.step, attempt=driver.state.attempt, hurry=True
                    )
                    for peer in set(driver.setup.roster) - {context.network.peer_id}:
                        with suppress(SwarmError):
                            await context.network.call(
                                peer, context.methods.standing, request.to_bytes(), timeout_s=1.0
                            )
                    await asyncio.sleep(0.01)

            driver._act = act_but_sign  # type: ignore[method-assign]
            hurrying = asyncio.create_task(hurry())
            try:
                return await super()._drive(driver, context)
            finally:
                hurrying.cancel()

    async def main() -> None:
        async with Swarm(config(name="n12", min_group=3, outer_steps=3)) as swarm:
            for index in range(4):
                await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=0.5))
            await swarm.join("liar", kind=Hurrying, inner=SyntheticInner(virtual_step_s=0.5))
            members = await swarm.finish("m0", "m1", "m2", "m3")
            assert withheld == [1]
            assert_equal_steps(members, 3)
            steps = [event.num_steps for member in members for event in member.of(IntervalDone)]
            assert 1 in steps, steps

    virtual_time.run(main(), compute_s=lambda work: 0.5 if getattr(work, "__name__", "") == "load" else 0.0)


@pytest.mark.parametrize("who", ["a stranger", "a member"])
def test_peer_that_hurries_all_members_and_names_later_attempts_stops_nobody(who: str) -> None:
    """Only the coordinator may hurry others, and only members that have moved on may name later attempts."""

    async def main() -> None:
        # with a smaller min_group, two runs could begin before there is a roster: see docs/explanation/one-history.md
        async with Swarm(config(min_group=3, outer_steps=NUM_STEPS)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}")
            network = swarm.internet.network(Identity(b"e" * 32))
            if who == "a member":
                network = (await swarm.join("nag")).network
            nagging = asyncio.create_task(_nag(network, swarm))
            members = await swarm.finish("m0", "m1", "m2")
            nagging.cancel()
            assert_equal_steps(members, NUM_STEPS)
            # the coordinator of one step may hurry the others
            whole = [event.num_steps for member in members for event in member.of(IntervalDone)]
            assert whole.count(5) >= len(whole) - (0 if who == "a stranger" else 3), whole
            await asyncio.sleep(0)
            if who == "a stranger":
                await network.close()

    # loading a state takes time, and an interval that is hurried meanwhile has a single step
    virtual_time.run(main(), compute_s=lambda work: 0.5 if getattr(work, "__name__", "") == "load" else 0.0)


async def _nag(network: MemoryNetwork, swarm: Swarm) -> None:
    standing = Methods(swarm.run.run_id).standing
    attempt = 0
    while True:
        attempt += 1
        for member in list(swarm.members.values()):
            for step in range(1, NUM_STEPS + 1):
                request = StandingRequest(run=swarm.run.run_id, step=step, attempt=attempt, hurry=True)
                with suppress(SwarmError):
                    await network.call(member.peer_id, standing, request.to_bytes(), timeout_s=1.0)
        await asyncio.sleep(0.1)


class Greedy(SyntheticInner):
    def train(self, *arguments: object, **options: object) -> IntervalResult:
        result = super().train(*arguments, **options)  # type: ignore[arg-type]
        return replace(result, num_tokens=10**9)


def test_member_that_claims_a_huge_weight_gets_no_weight() -> None:
    async def main() -> None:
        members, liar = await run_with_liar(RunMember, inner=Greedy())
        assert_equal_steps(members, NUM_STEPS)
        for member in members:
            assert all(event.num_tokens <= 4 * 40 for event in member.of(OuterStep))
            assert all(liar.peer_id not in event.group for event in member.of(OuterStep))

    virtual_time.run(main())


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoFacedSignatures(RunSignatures):
    """Sign a second group for the same attempt without one of the members, and show it to a victim on a separate
    stream."""

    network: MemoryNetwork
    second: list[SignedGroup]
    shown: list[ShownGroups]

    def sign_group(self, group: Group, now: float, sequence: int = 0) -> SignedGroup:
        me, victim = self.identity.peer_id, self._victim(group)
        out = next((peer for peer in group.peer_ids if peer not in {me, victim}), "")
        members = tuple(member for member in group.members if member.peer_id != out)
        if out and group.part_values:
            sizes = part_sizes(group.num_values, members)
            other = RunSignatures.sign_group(self, replace(group, members=members, part_values=sizes), now, sequence)
            self.second.append(other)
            asyncio.get_running_loop().create_task(self._show(other), name="second face")
        return RunSignatures.sign_group(self, group, now, sequence)

    def _victim(self, group: Group) -> str:
        return next(peer for peer in group.peer_ids if peer != self.identity.peer_id)

    async def _show(self, signed: SignedGroup) -> None:
        victim = self._victim(signed.group)
        try:
            async with self.network.stream(victim, Methods(self.run).reduce, timeout_s=1.0) as stream:
                await asyncio.sleep(0.02)
                self.shown[-1].add(signed)
                opening = ReduceOpening(kind="exchange", part=0, step=signed.group.step, group_digest=signed.digest)
                await stream.send(opening.to_bytes())
                await stream.receive()
        except SwarmError:
            pass


def test_coordinator_that_signs_two_groups_is_named_by_a_member_that_sees_both() -> None:
    class TwoFaced(AlteredMember):
        second: list[SignedGroup]

        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            self.shown.append(driver.groups)
            return await super()._drive(driver, context)

        async def _open_context(self) -> RunContext:
            context = await super()._open_context()
            self.second, self.shown = [], list[ShownGroups]()
            assert isinstance(context.network, MemoryNetwork)
            signatures = TwoFacedSignatures(
                identity=context.signatures.identity,
                network_id="test",
                run=context.run,
                network=context.network,
                second=self.second,
                shown=self.shown,
            )
            return replace(context, signatures=signatures)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=100)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=200_000))
            liar = await swarm.join("two-faced", kind=TwoFaced, inner=SyntheticInner(num_values=200_000))
            assert isinstance(liar.trainer, TwoFaced)
            members = [swarm.members[name] for name in ("m0", "m1", "m2")]
            words = f"{short_id(liar.peer_id)} signed two groups"
            async with asyncio.timeout(100.0):
                while not any(words in each.reason for member in members for each in member.of(RoundAborted)):
                    await asyncio.sleep(0.01)
                num_steps = len(members[0].of(OuterStep)) + 2
                while any(len(member.of(OuterStep)) < num_steps for member in members):
                    await asyncio.sleep(0.01)
            assert liar.trainer.second
            convicted = [event for member in members for event in member.of(MemberConvicted)]
            assert {(event.peer_id, event.kind) for event in convicted} == {(liar.peer_id, "equivocation")}
            assert "two different groups" in convicted[0].reason
            digests = {(event.step, event.digest) for member in members for event in member.of(OuterStep)}
            assert len(digests) == len({step for step, _ in digests})

    virtual_time.run(main(), compute_s=lambda _: 0.01)


def test_made_up_lock_is_refused_and_delays_nobody() -> None:
    """A lock is proved by its votes. Otherwise the next group would look in vain for the parts of its outcome."""
    refusals: list[str] = []

    class Liar(RunMember):
        async def _open_context(self) -> RunContext:
            context = await super()._open_context()
            return replace(context, network=LyingNetwork(context, refusals))  # type: ignore[arg-type]

    async def main() -> None:
        members, liar = await run_with_liar(Liar)
        assert_equal_steps(members, NUM_STEPS)
        assert refusals
        assert all("1 of 4 members voted" in refusal for refusal in refusals), refusals
        reasons = [event.reason for member in members for event in member.of(RoundAborted)]
        assert not any("cannot be fetched" in reason or "another state" in reason for reason in reasons), reasons
        assert any(liar.peer_id not in event.group for event in members[0].of(OuterStep))

    virtual_time.run(main())


def test_member_that_votes_for_two_outcomes_has_nobody_commit_another_state() -> None:
    """Its false vote arrives at the others first. The two votes convict it, even if the step is committed meanwhile."""

    class Equivocator(RunMember):
        async def _open_context(self) -> RunContext:
            context = await super()._open_context()
            return replace(context, network=TwoVotesNetwork(context, sent))  # type: ignore[arg-type]

    sent: list[str] = []

    async def main() -> None:
        members, _ = await run_with_liar(Equivocator)
        assert sent
        assert_equal_steps(members, NUM_STEPS)
        assert {event.kind for member in members for event in member.of(MemberConvicted)} == {"equivocation"}

    virtual_time.run(main())


class TwoVotesNetwork:
    """Send another vote of the same kind, for another outcome, before each vote of its owner."""

    def __init__(self, context: RunContext, sent: list[str]) -> None:
        self._real = context.network
        self._context = context
        self._sent = sent

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    async def call(self, peer_id: str, method: str, request: bytes, **bounds: float) -> bytes:
        if method == self._context.methods.vote:
            vote = Vote.from_bytes(request)
            other = replace(vote, outcome=replace(vote.outcome, state_digest=bytes(32)))
            data = self._context.signatures.sign_vote(other).to_bytes()
            await self._real.call(peer_id, method, data, timeout_s=1.0)
            self._sent.append(peer_id)
        return await self._real.call(peer_id, method, request, **bounds)


@pytest.mark.parametrize("change", [{"sequence": 1}, {"state_digest": bytes(32)}], ids=min)
def test_commit_vote_that_names_another_state_or_order_is_in_no_certificate(change: dict[str, object]) -> None:
    """Its signature does not hold for the group's vote: all members would have ended with an invalid certificate of
    their own."""

    class Stray(RunMember):
        async def _open_context(self) -> RunContext:
            context = await super()._open_context()
            return replace(context, network=StrayVotesNetwork(context, change, sent))  # type: ignore[arg-type]

    sent: list[str] = []

    async def main() -> None:
        members, _ = await run_with_liar(Stray)
        assert sent
        assert_equal_steps(members, NUM_STEPS)

    virtual_time.run(main())


class StrayVotesNetwork:
    """Change each commit vote of its owner, signature included."""

    def __init__(self, context: RunContext, change: dict[str, object], sent: list[str]) -> None:
        self._real = context.network
        self._context = context
        self._change = change
        self._sent = sent

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    async def call(self, peer_id: str, method: str, request: bytes, **bounds: float) -> bytes:
        if method == self._context.methods.vote and (vote := Vote.from_bytes(request)).kind == "commit":
            request = self._context.signatures.sign_vote(replace(vote, **self._change)).to_bytes()  # type: ignore[arg-type]
            self._sent.append(peer_id)
        return await self._real.call(peer_id, method, request, **bounds)


class LyingNetwork:
    """Add to each report of its owner a lock for which only the owner has voted."""

    def __init__(self, context: RunContext, refusals: list[str]) -> None:
        self._real = context.network
        self._context = context
        self.refusals = refusals

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    async def call(self, peer_id: str, method: str, request: bytes, **bounds: float) -> bytes:
        if method == self._context.methods.ready and self._context.replica.proof is not None:
            ready = Ready.from_bytes(request)
            honest = self._context.replica.proof.origin
            group = replace(honest, step=ready.step, attempt=ready.attempt, state_digest=ready.state_digest)
            signed = self._context.signatures.sign_group(group, self._real.now())
            outcome = Outcome(
                origin_digest=signed.digest,
                part_digests=(bytes(32),) * len(group.part_values),
                state_digest=bytes(32),
            )
            vote = signed.vote(outcome, "prepare")
            votes = placed_votes(vote, [self._context.signatures], self._context.replica.roster)
            lock = Lock(attempt=ready.attempt, group_digest=signed.digest, outcome=outcome, votes=votes)
            claim = replace(ready, lock=lock, origin=signed.data)
            request = self._context.signatures.sign_report(claim).to_bytes()
            try:
                return await self._real.call(peer_id, method, request, **bounds)
            except PeerViolation as error:
                self.refusals.append(error.message)
                raise
        return await self._real.call(peer_id, method, request, **bounds)


def peer_id_of(name: str) -> str:
    """Return the peer id of the swarm's member of this name."""
    return Identity(hashlib.sha256(name.encode()).digest()).peer_id


def test_joiner_that_the_run_does_not_admit_ends_with_a_one_line_error() -> None:
    async def main() -> None:
        admitted = (peer_id_of("m0"), peer_id_of("m1"))
        async with Swarm(config(min_group=2, admission=admitted)) as swarm:
            for name in ("m0", "m1"):
                await swarm.join(name)
            stranger = await swarm.join("stranger")
            assert stranger.task is not None
            with pytest.raises(ConfigError, match=f"and not {stranger.peer_id}") as caught:
                await stranger.task
            assert "\n" not in str(caught.value)
            assert "ask its author" in caught.value.remedy
            stranger.task = None
            assert_equal_steps(await swarm.finish("m0", "m1"), NUM_STEPS)

    virtual_time.run(main())


def test_peer_that_joins_without_admission_is_in_no_group() -> None:
    """It is not in the first group either, whose coordinator could be any peer."""

    class Brazen(RunMember):
        def _check_admitted(self) -> None:
            pass

    async def main() -> None:
        names = ("m0", "m1", "m2")
        admitted = tuple(map(peer_id_of, names))
        async with Swarm(config(min_group=2, admission=admitted)) as swarm:
            strangers = [await swarm.join(f"stranger {index}", kind=Brazen) for index in range(3)]
            for name in names:
                await swarm.join(name)
            members = await swarm.finish(*names)
            assert_equal_steps(members, NUM_STEPS)
            for member in members:
                groups = [set(event.group) for event in (*member.of(Admitted), *member.of(OuterStep))]
                assert all(group == set(admitted) for group in groups)
            reasons = {event.reason for each in strangers for event in each.of(RoundAborted)}
            assert "left out: the run does not admit it" in reasons

    virtual_time.run(main())
