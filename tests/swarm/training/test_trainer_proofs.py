"""Tests that members which lie about their reductions are convicted by evidence, that their lies are never applied, and
that no honest member is convicted."""

from __future__ import annotations

import asyncio
import contextvars
import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from support.faults import Fault, FaultScript
from support.lying_owners import owner_that, times_minus_ten, without_the_first
from support.training_swarm import (
    AlteredMember,
    Member,
    SpoiledCodec,
    Swarm,
    SyntheticInner,
    assert_equal_steps,
    config,
    identity_of,
)
from swarm.network import framing
from swarm.network.interface import Stream
from swarm.network.memory.memory_link import LinkModel
from swarm.testing import virtual_time
from swarm.training.allreduce import leaf_checks
from swarm.training.allreduce.audit import Auditing
from swarm.training.allreduce.butterfly import Butterfly, Exchange
from swarm.training.allreduce.committed_slices import MadePart
from swarm.training.allreduce.leaf_checks import hashed_part
from swarm.training.allreduce.part_reduction import PartOwner
from swarm.training.allreduce.part_streams import PartStreams
from swarm.training.allreduce.parts import PartResult, part_values
from swarm.training.evidence.evidence import check
from swarm.training.member import round_driver
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember
from swarm.training.round.round_events import ReduceFailed
from swarm.training.round.round_state import RoundSetup
from swarm.training.state.certificate import RunSignatures, Sealed
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import MemberConvicted, OuterStep, RoundAborted
from swarm_compression import get_codec
from swarm_protocol.errors import PeerUnreachable, PeerViolation, RoundError, SwarmError
from swarm_protocol.identity import Identity, short_id
from swarm_protocol.proof_messages import Evidence, WrongReduction
from swarm_protocol.reduction_messages import AuditDraw, AuditedSlice, PartStatement, ReduceOpening

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NUM_STEPS = 4
NUM_VALUES = 6000


def assert_convicted(members: list[Member], liar: Member) -> None:
    """Assert that each of the honest `members` has convicted the liar and nobody else by evidence that anyone can
    check, and that they have one state, which is as near to the target as without a liar."""
    assert_equal_steps(members, NUM_STEPS)
    for member in members:
        (event,) = member.of(MemberConvicted)
        assert event.peer_id == liar.peer_id
        assert event.step <= 3
        convictions, run = member.trainer._steps.convictions, member.trainer._run
        assert convictions is not None
        outsider = RunSignatures(identity=Identity(b"o" * 32), network_id="test", run=run.run_id)
        (ban,) = convictions.bans
        verdict = check(Evidence.from_bytes(ban.data), outsider, run.config)
        assert verdict.peer_id == liar.peer_id
        last = member.of(OuterStep)[-1]
        assert liar.peer_id not in last.group
        assert len(last.group) == len(members)
        state = member.trainer.state
        assert state is not None
        assert (state.theta_N - member.inner.target_N).norm() < 0.8 * member.inner.target_N.norm()


async def run_with(kind: type[RunMember], *, aggregator: str) -> tuple[list[Member], Member]:
    """Run four honest members with a liar of this kind."""
    async with Swarm(config(min_group=3, outer_steps=NUM_STEPS, aggregator=aggregator)) as swarm:
        names = [f"m{index}" for index in range(4)]
        for name in names:
            await swarm.join(name, inner=SyntheticInner(num_values=NUM_VALUES))
        liar = await swarm.join("liar", kind=kind, inner=SyntheticInner(num_values=NUM_VALUES))
        return await swarm.finish(*names), liar


@pytest.mark.parametrize("aggregator", ["mean", "centered_clip", "median"])
def test_owner_that_multiplies_its_part_by_minus_ten_is_convicted_and_its_part_never_applied(aggregator: str) -> None:
    async def main() -> None:
        members, liar = await run_with(owner_that(times_minus_ten), aggregator=aggregator)
        assert_convicted(members, liar)
        for member in members:
            assert all(liar.peer_id not in event.group for event in member.of(OuterStep))

    virtual_time.run(main())


def test_part_is_audited_at_its_backup_when_the_owners_clock_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner signs its part with a time that the others refuse, and the attempt goes on."""
    late, rightly = identity_of("m1").peer_id, RunSignatures.sign

    def sign(self: RunSignatures, message: Sealed, now: float) -> bytes:
        is_late = isinstance(message, PartStatement) and self.identity.peer_id == late
        return rightly(self, message, now + 3600 if is_late else now)

    monkeypatch.setattr(RunSignatures, "sign", sign)

    async def main() -> None:
        async with Swarm(config(min_group=3, outer_steps=NUM_STEPS)) as swarm:
            for index in range(5):
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=NUM_VALUES))
            members = await swarm.finish()
            assert_equal_steps(members, NUM_STEPS)
            assert [event.reason for member in members for event in member.of(RoundAborted)] == []
            assert all(late in event.group for event in members[0].of(OuterStep))

    virtual_time.run(main())


def test_owner_is_drawn_no_leaf_before_it_has_signed_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that knew the leaves could sign a result that is right in these alone."""
    answer, late, asked, drawn = Auditing.answer, identity_of("m1").peer_id, list[int](), list[int]()

    async def answer_what_is_drawn(self: Auditing, part: int, stream: Stream) -> None:
        if self._streams.me == late and self._group.peer_ids[part] == late:
            asked.append(part)
            drawn.append(AuditDraw.from_bytes(await stream.receive()).leaf)
        else:
            await answer(self, part, stream)

    monkeypatch.setattr(Auditing, "answer", answer_what_is_drawn)

    async def main() -> None:
        async with Swarm(config(min_group=3, outer_steps=NUM_STEPS)) as swarm:
            for index in range(5):
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=NUM_VALUES))
            assert_equal_steps(await swarm.finish(), NUM_STEPS)

    virtual_time.run(main())
    assert len(asked) >= 4
    assert drawn == []


def test_owner_that_signs_another_result_than_it_gives_is_left_out_and_nobody_is_accused_without_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    liar_id, rightly = identity_of("liar").peer_id, RunSignatures.sign

    def sign(self: RunSignatures, message: Sealed, now: float) -> bytes:
        if isinstance(message, PartStatement) and self.identity.peer_id == liar_id:
            message = replace(message, result_root=b"r" * 32)
        return rightly(self, message, now)

    monkeypatch.setattr(RunSignatures, "sign", sign)

    async def main() -> None:
        members, liar = await run_with(owner_that(times_minus_ten), aggregator="mean")
        assert_equal_steps(members, NUM_STEPS)
        for member in members:
            assert member.of(MemberConvicted) == []
            assert all(liar.peer_id not in event.group for event in member.of(OuterStep))
        reasons = {event.reason for member in members for event in member.of(RoundAborted)}
        assert any("it signed another result than it gave" in reason for reason in reasons), reasons

    virtual_time.run(main())


async def skips_its_own_check(_self: Auditing, _case: object) -> None:
    raise RoundError("the backup leaves it to the other auditors")


def test_owner_that_shows_only_one_drawn_leaf_is_convicted_by_that_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backup would also convict it, and skips its check here."""
    answer, liars, shown = Auditing.answer, set[str](), list[int]()

    async def answer_one(self: Auditing, part: int, stream: Stream) -> None:
        me = self._streams.me
        if me not in liars or self._group.peer_ids[part] != me:
            return await answer(self, part, stream)
        made, statement = await self._answer_for(part)
        await self._streams.send(stream, statement)
        leaf = AuditDraw.from_bytes(await stream.receive()).leaf
        for each in made.slices_of(leaf):
            await self._streams.send(stream, each.to_bytes())
        shown.append(leaf)
        raise RoundError("it is busy")

    monkeypatch.setattr(Auditing, "answer", answer_one)
    monkeypatch.setattr(leaf_checks, "LEAST_BYTES", 1 << 16)  # so that each auditor draws several leaves
    monkeypatch.setattr(Auditing, "_look_at_own", skips_its_own_check)
    liars.add(identity_of("liar").peer_id)

    async def main() -> None:
        members, liar = await run_with(owner_that(times_minus_ten), aggregator="mean")
        assert shown
        assert_convicted(members, liar)

    virtual_time.run(main())


@pytest.mark.parametrize("how", ["refuses", "shows others", "refuses, and its backup looks no further"])
def test_owner_that_signs_a_lie_and_shows_no_leaf_is_convicted_by_its_backups_slices(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner could otherwise answer only the auditors that drew an honest leaf, and these would vote."""
    answer, audit, refused, liars = Auditing.answer, Auditing.audit, list[int](), set[str]()

    async def answer_first_only(self: Auditing, part: int, stream: Stream) -> None:
        me = self._streams.me
        if me not in liars or self._group.peer_ids[part] != me:
            return await answer(self, part, stream)
        _, statement = await self._answer_for(part)
        await self._streams.send(stream, statement)
        await stream.receive()
        refused.append(part)
        if how != "shows others":
            raise RoundError("it is busy")
        nothing = AuditedSlice(data=b"\0", proof=b"")
        for _ in self._group.contributors:
            await self._streams.send(stream, nothing.to_bytes())
        return None

    async def audit_others(self: Auditing, parts: Any, within_s: float) -> None:
        if self._streams.me not in liars:  # a liar's own reduction would find all others wrong
            await audit(self, parts, within_s)

    monkeypatch.setattr(Auditing, "answer", answer_first_only)
    monkeypatch.setattr(Auditing, "audit", audit_others)
    if how.endswith("looks no further"):
        monkeypatch.setattr(Auditing, "_look_at_own", skips_its_own_check)
    liars.add(identity_of("liar").peer_id)

    async def main() -> None:
        members, liar = await run_with(owner_that(times_minus_ten), aggregator="mean")
        assert refused
        assert_convicted(members, liar)
        for member in members:
            assert all(liar.peer_id not in event.group for event in member.of(OuterStep))

    virtual_time.run(main())


def test_owner_that_drops_a_members_slice_is_convicted() -> None:
    async def main() -> None:
        members, liar = await run_with(owner_that(without_the_first), aggregator="mean")
        assert_convicted(members, liar)

    virtual_time.run(main())


PEER = contextvars.ContextVar("PEER", default="")


def test_owner_that_delivers_different_results_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, accept, answer_for = get_codec("int8"), Butterfly.accept, Auditing._answer_for
    liars: set[str] = set()

    def lie(part: Any) -> bytes:
        (frame,) = part.frames
        return codec.encode(-10 * codec.decode(part.data, frame.stop - frame.start))

    def is_victim(butterfly: Any, peer: str) -> bool:
        others = [each for each in butterfly.group.peer_ids if each not in liars]
        return butterfly.me in liars and peer == others[0]

    async def accept_knowing(self: Butterfly, peer: str, opening: ReduceOpening, stream: Stream) -> None:
        PEER.set(peer)
        await accept(self, peer, opening, stream)

    async def deliver(self: PartOwner, peer: str) -> None:
        stream = await self._accepted_from(peer)
        await self._part.wait_for_frames(len(self._part.frames))
        data = lie(self._part) if is_victim(self._streams, peer) else self._part.data
        await self._streams.send(stream, data)
        await stream.finish()

    async def answer_as_given(self: Auditing, part: int) -> tuple[MadePart, bytes]:
        made, statement = await answer_for(self, part)
        if not is_victim(self._streams, PEER.get()):
            return made, statement
        tree, _ = hashed_part(codec, self._group, part, lie(self.butterfly._parts[part]))
        _, honest = self._read(statement)
        return made, self._sign(replace(honest, result_root=tree.root))

    async def main() -> None:
        monkeypatch.setattr(Butterfly, "accept", accept_knowing)
        monkeypatch.setattr(PartOwner, "_deliver", deliver)
        monkeypatch.setattr(Auditing, "_answer_for", answer_as_given)
        liars.add(identity_of("liar").peer_id)
        members, liar = await run_with(RunMember, aggregator="mean")
        assert_convicted(members, liar)

    virtual_time.run(main())


def test_member_that_sends_other_slices_than_it_committed_to_is_named_and_left_out() -> None:
    """Its signatures do not contradict each other, so that there is no evidence. Owners refuse the slices."""

    class Liar(AlteredMember):
        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            reduce = driver.reductions.reduce

            async def reduce_other(signed: Any, offer: Any) -> None:
                await reduce(signed, replace(offer, delta_F=-10 * offer.delta_F) if offer and offer.tree else offer)

            driver.reductions.reduce = reduce_other  # type: ignore[method-assign]
            return await super()._drive(driver, context)

    async def main() -> None:
        members, liar = await run_with(Liar, aggregator="mean")
        assert_equal_steps(members, NUM_STEPS)
        for member in members:
            assert not member.of(MemberConvicted)
            assert all(liar.peer_id not in event.group for event in member.of(OuterStep))
        reasons = [event.reason for member in members for event in member.of(RoundAborted)]
        assert any(short_id(liar.peer_id) in reason and "committed to" in reason for reason in reasons), reasons

    virtual_time.run(main())


def with_bad_scales(data: bytes) -> bytes:
    """Return encoded int8 values with NaN as the scale of each block, for any cut of the vector."""
    num_blocks = -(-len(data) // 260)
    return b"\x00\x00\xc0\x7f" * num_blocks + data[4 * num_blocks :]


class BadSlices(SpoiledCodec):
    """Spoil slices, but give a decodable result of the member's own part."""

    def combine(self, encoded: Any, weights: Any, num_values: int, buffer: Any) -> None:
        self._honest.combine(encoded[:1], weights[:1], num_values, buffer)


def test_member_that_commits_to_undecodable_slices_is_convicted_by_its_commitment() -> None:
    class Liar(RunMember):
        async def _open_context(self) -> RunContext:
            return replace(await super()._open_context(), codec=BadSlices(with_bad_scales))

    async def main() -> None:
        members, liar = await run_with(Liar, aggregator="mean")
        assert_convicted(members, liar)
        for member in members:
            assert all(liar.peer_id not in event.group for event in member.of(OuterStep))
            (event,) = member.of(MemberConvicted)
            assert "cannot be decoded" in event.reason

    virtual_time.run(main())


MARK = 7.0
MARK_SCALE = get_codec("int8").encode(torch.full((256,), MARK))[:4]
ACCOMPLICE = "accomplice"
NAMES = ("m0", "m1", "m2", "m3", ACCOMPLICE, "liar")


def with_bad_scales_where_marked(data: bytes) -> bytes:
    """Return encoded int8 values with NaN as the scale of each block in which MARK is the largest value."""
    num_blocks = -(-len(data) // 260)
    scales = [data[4 * index : 4 * index + 4] for index in range(num_blocks)]
    return b"".join(b"\x00\x00\xc0\x7f" if each == MARK_SCALE else each for each in scales) + data[4 * num_blocks :]


class Decodes(SpoiledCodec):
    """Leave out slices that cannot be decoded, so that the result can be."""

    def combine(self, encoded: Any, weights: Any, num_values: int, buffer: Any) -> None:
        pairs = zip(encoded, weights, strict=True)
        whole = [(data, weight) for data, weight in pairs if b"\x00\x00\xc0\x7f" not in bytes(data)]
        self._honest.combine(*zip(*whole, strict=True), num_values, buffer)


def member_with(codec: SpoiledCodec) -> type[RunMember]:
    class Spoiled(RunMember):
        async def _open_context(self) -> RunContext:
            return replace(await super()._open_context(), codec=codec)

    return Spoiled


async def lie_to_the_accomplice(
    monkeypatch: pytest.MonkeyPatch, accomplice: type[RunMember]
) -> tuple[list[Member], Member, Member]:
    """Run four honest members with an accomplice, and with a liar that commits to undecodable slices in the
    accomplice's part only. Return the four members, the liar and the accomplice."""
    peers = sorted(identity_of(name).peer_id for name in NAMES)
    edges = [0, *accumulate(part_values(NUM_VALUES, (1.0,) * len(peers)))]
    part = peers.index(identity_of(ACCOMPLICE).peer_id)
    commit = round_driver.commit_slices

    async def commit_marked(context: RunContext, setup: RoundSetup, offer: IntervalOffer) -> IntervalOffer:
        if setup.me == identity_of("liar").peer_id and offer.delta_F is not None:
            offer.delta_F[edges[part] : edges[part + 1]] = MARK
        return await commit(context, setup, offer)

    monkeypatch.setattr(round_driver, "commit_slices", commit_marked)
    async with Swarm(config(min_group=3, outer_steps=NUM_STEPS, aggregator="mean")) as swarm:
        kinds = {"liar": member_with(Decodes(with_bad_scales_where_marked)), ACCOMPLICE: accomplice}
        for name in NAMES:
            await swarm.join(name, kind=kinds.get(name, RunMember), inner=SyntheticInner(num_values=NUM_VALUES))
        members = await swarm.finish(*NAMES[:4])
        return members, swarm.members["liar"], swarm.members[ACCOMPLICE]


def test_member_with_an_undecodable_slice_is_convicted_together_with_the_owner_that_hides_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        members, liar, owner = await lie_to_the_accomplice(monkeypatch, member_with(Decodes(lambda data: data)))
        assert_equal_steps(members, NUM_STEPS)
        for member in members:
            reasons = {event.peer_id: event.reason for event in member.of(MemberConvicted)}
            assert reasons.keys() == {liar.peer_id, owner.peer_id}
            assert "cannot be decoded" in reasons[liar.peer_id]
            assert "signed a wrong result" in reasons[owner.peer_id]
            assert len(member.of(RoundAborted)) == 1, "both must be convicted in one attempt"

    virtual_time.run(main())


def test_member_is_convicted_when_only_the_backup_finds_its_bad_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner is present and has left its slices with its backup, but does not reduce its part."""
    reduce, withheld = PartOwner.reduce, list[str]()

    async def withhold(self: PartOwner) -> None:
        if self._streams.me == identity_of(ACCOMPLICE).peer_id and not withheld:
            withheld.append(self._streams.me)
            await asyncio.get_running_loop().create_future()
        await reduce(self)

    monkeypatch.setattr(PartOwner, "reduce", withhold)

    async def main() -> None:
        members, liar, owner = await lie_to_the_accomplice(monkeypatch, RunMember)
        assert withheld == [owner.peer_id]
        assert_equal_steps(members, NUM_STEPS)
        for member in members:
            (event,) = member.of(MemberConvicted)
            assert event.peer_id == liar.peer_id
            assert "cannot be decoded" in event.reason
            assert len(member.of(RoundAborted)) == 1, (
                "the conviction must come in the attempt in which the backup finds the slice"
            )

    virtual_time.run(main())


@pytest.mark.parametrize("ends", ["attempt", "stream"])
def test_member_that_ends_the_attempt_before_the_proof_of_its_bad_slice_is_named_and_left_out(ends: str) -> None:
    class Liar(AlteredMember):
        async def _open_context(self) -> RunContext:
            return replace(await super()._open_context(), codec=BadSlices(with_bad_scales))

        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            accept = driver.reductions.accept

            async def leave(peer: str, opening: ReduceOpening, stream: Stream) -> None:
                if opening.kind != "proof":
                    return await accept(peer, opening, stream)
                asked.add(peer)
                if ends == "stream":
                    return None
                if len(asked) == 4:
                    driver.feed(ReduceFailed(attempt=driver.state.attempt, reason="it leaves"))
                return await asyncio.sleep(60)

            driver.reductions.accept = leave  # type: ignore[method-assign]
            return await super()._drive(driver, context)

    asked = set[str]()

    async def main() -> None:
        members, liar = await run_with(Liar, aggregator="mean")
        assert_equal_steps(members, NUM_STEPS)
        assert asked == {member.peer_id for member in members}
        for member in members:
            assert not member.of(MemberConvicted)
            assert all(liar.peer_id not in event.group for event in member.of(OuterStep))
            (aborted,) = member.of(RoundAborted)
            assert aborted.reason.endswith("left: it leaves") or (ends == "stream" and "bad slice" in aborted.reason)

    virtual_time.run(main())


@pytest.mark.parametrize("ends_it", [False, True])
def test_owner_that_answers_no_audit_gets_no_vote_and_is_left_out(ends_it: bool) -> None:
    class Silent(owner_that(times_minus_ten)):  # type: ignore[misc]
        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            accept = driver.reductions.accept

            async def refuse_audits(peer: str, opening: ReduceOpening, stream: Stream) -> None:
                if opening.kind == "audit":
                    if ends_it:
                        return
                    raise RuntimeError("no")
                await accept(peer, opening, stream)

            driver.reductions.accept = refuse_audits  # type: ignore[method-assign]
            return await super()._drive(driver, context)  # type: ignore[no-any-return]

    async def main() -> None:
        members, liar = await run_with(Silent, aggregator="mean")
        assert_equal_steps(members, NUM_STEPS)
        for member in members:
            assert not member.of(MemberConvicted)
            assert all(liar.peer_id not in event.group for event in member.of(OuterStep))

    virtual_time.run(main())


async def finished_beside(liar: str, *, num_values: int = NUM_VALUES, latency_s: float = 0.005) -> list[Member]:
    """Return three members that have made all steps beside a member of this name, and convicted nobody."""
    async with Swarm(config(min_group=3, outer_steps=NUM_STEPS), link=LinkModel(latency_s=latency_s)) as swarm:
        names = ("m0", "m1", "m2")
        for name in (*names, liar):
            await swarm.join(name, inner=SyntheticInner(num_values=num_values))
        members = await swarm.finish(*names)
        assert_equal_steps(members, NUM_STEPS)
        assert not any(member.of(MemberConvicted) for member in members)
        return members


def num_aborted(members: list[Member]) -> int:
    """Return how many attempts failed for the member that gave up most."""
    return max(len(member.of(RoundAborted)) for member in members)


@pytest.mark.parametrize("audit_s", [0.0, 60.0], ids=["no result", "late result, later audits"])
def test_owner_that_is_there_and_withholds_its_work_is_left_out(
    audit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backup cannot make the part without its slices. All members repeated the attempt with it without end."""
    hand_out, answer, me = PartOwner.hand_out, Auditing.answer, identity_of("liar").peer_id

    async def withhold(owner: PartOwner) -> None:
        if owner._streams.me == me:
            await asyncio.sleep(5.4 if audit_s else math.inf)
        await hand_out(owner)

    async def answer_late(self: Auditing, part: int, stream: Stream) -> None:
        if self._streams.me == me:
            await asyncio.sleep(audit_s)
        await answer(self, part, stream)

    async def keep_nothing(_self: PartOwner) -> None:
        pass

    monkeypatch.setattr(PartOwner, "hand_out", withhold)
    monkeypatch.setattr(PartOwner, "_leave_with_backup", keep_nothing)
    monkeypatch.setattr(Auditing, "answer", answer_late)

    async def main() -> None:
        members = await finished_beside("liar")
        assert 1 <= num_aborted(members) <= NUM_STEPS
        assert not any(me in event.group for member in members for event in member.of(OuterStep))

    virtual_time.run(main())


def test_owner_that_gives_its_result_to_one_member_costs_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others take the parts from that member when the time for results is over, and have time to audit them."""
    deliver, me, favourite = PartOwner._deliver, identity_of("liar").peer_id, identity_of("m0").peer_id

    async def deliver_to_one(self: PartOwner, peer: str) -> None:
        if self._streams.me == me and peer != favourite:
            await asyncio.get_running_loop().create_future()
        await deliver(self, peer)

    async def keep_nothing(_self: PartOwner) -> None:
        pass

    monkeypatch.setattr(PartOwner, "_deliver", deliver_to_one)
    monkeypatch.setattr(PartOwner, "_leave_with_backup", keep_nothing)

    async def main() -> None:
        members = await finished_beside("liar", latency_s=0.2)
        assert num_aborted(members) == 0
        assert all(me in event.group for event in members[0].of(OuterStep))

    virtual_time.run(main())


def test_member_that_takes_no_result_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners would wait for room in its streams, and vote only once all members have their results."""
    take, send, fail = PartStreams.take_result, PartStreams.send_slices, Butterfly.fail
    me, waited = identity_of("liar").peer_id, list[str]()

    async def take_nothing(self: PartStreams, stream: Stream, part: PartResult, peer: str, first: int = 0) -> None:
        if self.me == me:
            waited.append(peer)
            await asyncio.get_running_loop().create_future()
        await take(self, stream, part, peer, first)

    async def send_at_once(self: PartStreams, *arguments: Any, ahead: int | None = None, phase: str = "") -> None:
        await send(self, *arguments, ahead=None if self.me == me else ahead, phase=phase)

    async def stay(self: Butterfly, error: SwarmError) -> None:
        await (asyncio.get_running_loop().create_future() if self.streams.me == me else fail(self, error))

    monkeypatch.setattr(PartStreams, "take_result", take_nothing)
    monkeypatch.setattr(PartStreams, "send_slices", send_at_once)
    monkeypatch.setattr(Butterfly, "fail", stay)
    monkeypatch.setattr(framing, "WINDOW_BYTES", 1 << 18)
    monkeypatch.setattr(framing, "_GRANT_BYTES", 1 << 16)

    async def main() -> None:
        members = await finished_beside("liar", num_values=1_600_000)
        assert waited
        assert num_aborted(members) <= NUM_STEPS

    virtual_time.run(main())


def test_member_that_holds_up_one_owner_frame_by_frame_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its slices comes before the owner gives up, and all together take longer than the reduction may."""
    send, me, victim = PartStreams._send_slice, identity_of("liar").peer_id, identity_of("m0").peer_id

    async def send_late(self: PartStreams, stream: Stream, part: PartResult, index: int) -> None:
        if self.me == me and part.owner == victim:
            await asyncio.sleep(0.45 * self.group.reduce_s)
        await send(self, stream, part, index)

    monkeypatch.setattr(PartStreams, "_send_slice", send_late)

    async def main() -> None:
        members = await finished_beside("liar", num_values=1_600_000)
        assert 1 <= num_aborted(members) <= 2 * NUM_STEPS
        reasons = {event.reason for event in members[0].of(RoundAborted)}
        assert all(short_id(me) in reason for reason in reasons), reasons

    virtual_time.run(main())


def test_owner_is_not_accused_of_the_result_that_its_lying_backup_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members would not work with it any more, and it is honest."""
    names = ("m0", "m1", "m2", "liar")
    peers = sorted(identity_of(name).peer_id for name in names)
    liar = identity_of("liar").peer_id
    owner = peers[peers.index(liar) - 1]
    converse, deliver, send_result, answer = (
        Exchange._converse,
        PartOwner._deliver,
        PartStreams.send_result,
        Auditing.answer,
    )
    lies = list[str]()

    async def deliver_nothing(self: PartOwner, peer: str) -> None:
        await (asyncio.get_running_loop().create_future() if self._streams.me == owner else deliver(self, peer))

    async def lose(self: Exchange, failed: asyncio.Future[SwarmError]) -> None:
        if self._part.owner == owner:
            broken = PeerUnreachable("the connection broke", peer_id=owner)
            asyncio.get_running_loop().call_later(0.2, failed.set_result, broken)
        await converse(self, failed)

    async def send_lie(self: PartStreams, stream: Stream, part: PartResult, first: int = 0, *, phase: str = "") -> None:
        if self.me != liar or part.owner != owner:
            return await send_result(self, stream, part, first, phase=phase)
        await part.wait_for_frames(1)
        lies.append(owner)
        codec, size = self.scheme.codec, part.frames[0].stop - part.frames[0].start
        return await self.send(stream, codec.encode(-10 * codec.decode(bytes(part.frame(0)), size)))

    async def refuse(self: Auditing, part: int, stream: Stream) -> None:
        if self._streams.me == liar:
            raise RoundError("it is busy")
        await answer(self, part, stream)

    monkeypatch.setattr(PartOwner, "_deliver", deliver_nothing)
    monkeypatch.setattr(Exchange, "_converse", lose)
    monkeypatch.setattr(PartStreams, "send_result", send_lie)
    monkeypatch.setattr(Auditing, "answer", refuse)

    async def main() -> None:
        for member in await finished_beside("liar"):
            assert member.trainer._steps is not None
            assert owner not in member.trainer._steps._accused
        assert lies

    virtual_time.run(main())


def test_peer_that_a_liar_names_to_a_backup_in_need_of_its_slices_is_not_accused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("m0", "m1", "m2", "liar")
    liar = identity_of("liar").peer_id
    peers = sorted(identity_of(name).peer_id for name in names)
    owner, backup, victim = (peers[(peers.index(liar) + ahead) % 4] for ahead in (2, 3, 1))
    answer, accept, named = Auditing.answer, Butterfly.accept, list[str]()

    async def refuse(self: Auditing, part: int, stream: Stream) -> None:
        if self._streams.me == owner:
            raise RoundError("it is busy")
        await answer(self, part, stream)

    async def name_another(self: Butterfly, peer: str, opening: ReduceOpening, stream: Stream) -> None:
        if (self.streams.me, peer, opening.kind) == (liar, backup, "slices"):
            named.append(victim)
            raise PeerViolation("it lied", peer_id=victim)
        await accept(self, peer, opening, stream)

    monkeypatch.setattr(Auditing, "answer", refuse)
    monkeypatch.setattr(Butterfly, "accept", name_another)

    async def main() -> None:
        for member in await finished_beside("liar"):
            assert member.trainer._steps is not None
            assert victim not in member.trainer._steps._accused
        assert named

    virtual_time.run(main())


def test_false_evidence_convicts_nobody_and_its_sender_is_ignored_afterwards() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=3, outer_steps=NUM_STEPS)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=NUM_VALUES))
            members = await swarm.finish()
            first, second = members[0], members[1]
            convictions = first.trainer._steps.convictions
            assert convictions is not None
            signatures = RunSignatures(identity=Identity(b"o" * 32), network_id="test", run=first.trainer._run.run_id)
            statement = signatures.sign(
                PartStatement(
                    run=signatures.run, step=1, attempt=0, group_digest=bytes(32), part=0, result_root=bytes(32)
                ),
                first.network.now(),
            )
            false = WrongReduction(group=b"group", statement=statement, leaf=0, result=b"", result_proof=b"", slices=())
            for reason in ("malformed", "earlier evidence proved nothing"):
                with pytest.raises(Exception, match=reason):
                    await convictions.take(false.evidence().to_bytes(), second.peer_id)
            assert not convictions.peers

    virtual_time.run(main())


@pytest.mark.parametrize("seed", range(2))
def test_no_honest_member_is_convicted_on_lossy_links_with_a_liar_and_a_member_that_dies(seed: int) -> None:
    phases = ("round.slice", "round.deliver")
    link = LinkModel(latency_s=0.02, jitter_s=0.05, loss=0.02)

    async def main() -> None:
        swarm = Swarm(config(min_group=3, outer_steps=NUM_STEPS), link=link, seed=seed)
        script = FaultScript([Fault(who="m4", phase=phases[seed], what="kill", nth=2)], kill=swarm.kill)
        swarm.script = script
        async with swarm:
            names = [f"m{index}" for index in range(4)]
            for name in (*names, "m4"):
                await swarm.join(name, inner=SyntheticInner(num_values=NUM_VALUES))
            liar = await swarm.join(
                "liar", kind=owner_that(times_minus_ten), inner=SyntheticInner(num_values=NUM_VALUES)
            )
            members = await swarm.finish(*names)
            assert_equal_steps(members, NUM_STEPS)
            for member in members:
                assert {event.peer_id for event in member.of(MemberConvicted)} <= {liar.peer_id}
            assert any(member.of(MemberConvicted) for member in members)
            state = members[0].trainer.state
            assert state is not None
            assert torch.isfinite(state.theta_N).all()
            assert (state.theta_N - members[0].inner.target_N).norm() < members[0].inner.target_N.norm()

    virtual_time.run(main())
