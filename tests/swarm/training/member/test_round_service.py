"""Tests how a closing member answers peers that wait for it, and which checks it makes for strangers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.round_scripts import COORDINATOR, STEP, locked, ready, signed
from swarm.testing import virtual_time
from swarm.training.member.peer_calls import POLL_S
from swarm.training.member.round_service import OPENING_S, RoundService
from swarm.training.round.round_events import Proven
from swarm.training.run.methods import Methods
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm_protocol import limits
from swarm_protocol.commit_messages import Certificate, Outcome, ResumeOrder
from swarm_protocol.envelope import seal_now
from swarm_protocol.errors import PeerRefused, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.member_messages import FollowRequest
from swarm_protocol.training_messages import Ready, ReadyReply, SignedGroup

NOW = 1_750_000_000.0


def make_service(outer_step: int) -> RoundService:
    replica = SimpleNamespace(outer_step=outer_step, proof=None, order=None)
    network = SimpleNamespace(release=lambda *_: None)
    context = SimpleNamespace(replica=replica, network=network, methods=Methods("run"))
    return RoundService(cast(Any, context), cast(Any, None))


def test_report_that_waits_for_a_step_is_refused_at_once_when_the_service_closes() -> None:
    async def main() -> None:
        service = make_service(STEP - 1)
        waiting = asyncio.create_task(service._answer(COORDINATOR, ready()))
        await asyncio.sleep(POLL_S / 2)
        assert not waiting.done()
        service.close()
        async with asyncio.timeout(0.1):
            with pytest.raises(PeerRefused, match="does not train any more"):
                await waiting
        with pytest.raises(PeerRefused, match="does not train any more"):
            await service._answer(COORDINATOR, ready())

    virtual_time.run(main())


def test_report_with_a_pending_answer_is_refused_when_the_service_has_closed() -> None:
    class Ending:
        async def take(self, *_: object) -> ReadyReply:
            await asyncio.sleep(1.0)
            return ReadyReply(kind="pending")

    async def main() -> None:
        service = make_service(STEP - 1)
        state = SimpleNamespace(abstains=False)
        service.set_driver(cast(Any, SimpleNamespace(setup=SimpleNamespace(step=STEP), state=state, reports=Ending())))
        assert (await service._answer(COORDINATOR, ready())).kind == "pending"
        waiting = asyncio.create_task(service._answer(COORDINATOR, ready()))
        await asyncio.sleep(0.5)
        service.close()
        with pytest.raises(PeerRefused, match="does not train any more"):
            await waiting

    virtual_time.run(main())


def test_report_is_refused_at_once_when_the_member_has_lost_its_state() -> None:
    """Others would otherwise wait for it as their coordinator."""
    driver = SimpleNamespace(setup=SimpleNamespace(step=STEP), state=SimpleNamespace(abstains=True))

    async def main() -> None:
        service = make_service(STEP - 1)
        service.set_driver(cast(Any, driver))
        with pytest.raises(PeerRefused, match="has lost the state"):
            await service._answer(COORDINATOR, ready())

    virtual_time.run(main())


@pytest.mark.parametrize("is_of_this_state", [True, False])
def test_group_of_a_lock_is_read_only_when_it_is_of_this_state_and_signed_by_a_member(is_of_this_state: bool) -> None:
    """Reading a group blocks the event loop for fifty milliseconds, and a stranger can make and sign any number of
    them."""
    group = signed()
    made_up = seal_now(
        Identity.generate(), "test", purpose="group", subject="run/1/0", payload=b"a group", now=NOW, lifetime_s=60.0
    )
    report = ready(lock=locked(group), origin=made_up)
    taken = list[str]()

    async def take_report(peer: str, _ready: Ready) -> ReadyReply:
        taken.append(peer)
        return ReadyReply(kind="left_out", reason="it is late")

    def check_origin(*_: object) -> SignedGroup:
        raise AssertionError("it was read")

    async def main() -> None:
        service = make_service(STEP - 1)
        context = cast(Any, service._context)
        context.signatures, context.network.now = SimpleNamespace(check_origin=check_origin), lambda: NOW
        state_digest = report.state_digest if is_of_this_state else b"another" + bytes(25)
        setup = SimpleNamespace(step=STEP, state_digest=state_digest, roster=("a", "b"))
        state, reports = SimpleNamespace(abstains=False), SimpleNamespace(take=take_report)
        service.set_driver(cast(Any, SimpleNamespace(setup=setup, state=state, reports=reports)))
        if is_of_this_state:
            with pytest.raises(PeerViolation, match="no member of the state"):
                await service._answer("stranger", report)
        else:
            assert (await service._answer("stranger", report)).kind == "left_out"

    virtual_time.run(main())
    assert bool(taken) == (not is_of_this_state)


@pytest.mark.parametrize(("signer", "match"), [(None, "has not committed"), (b"o" * 32, "has not signed")])
def test_report_without_a_genuine_commitment_to_its_slices_is_refused(signer: bytes | None, match: str) -> None:
    """The coordinator would sign a group that every member refuses, and would be blamed for it."""
    run, member = ready().run, Identity(bytes(32))
    signatures = RunSignatures(identity=member, network_id="test", run=run)
    report = ready()
    if signer is not None:
        other = RunSignatures(identity=Identity(signer), network_id="test", run=run)
        report = replace(report, commitment=other.sign_slices(STEP, report.state_digest, bytes(32)))
    service = make_service(STEP - 1)
    context = cast(Any, service._context)
    context.run, context.signatures, context.network.now = run, signatures, lambda: NOW
    context.replica.config = SimpleNamespace(max_group=4)
    with pytest.raises(PeerViolation, match=match):
        asyncio.run(service._on_ready(member.peer_id, signatures.sign_report(report).to_bytes()))


def test_certificate_of_a_group_is_refused_as_a_resume_order_before_it_is_checked() -> None:
    async def check(_certificate: bytes) -> None:
        raise AssertionError("it was checked")

    async def main() -> None:
        service = make_service(STEP)
        service._context.check = check  # type: ignore[method-assign, misc, assignment]
        outcome = Outcome(origin_digest=bytes(32), part_digests=(), state_digest=bytes(32))
        with pytest.raises(PeerViolation, match="not a resume order"):
            await service._on_resume("stranger", Certificate(group=b"a group", outcome=outcome).to_bytes())

    virtual_time.run(main())


def test_resume_order_with_the_maximum_number_of_members_is_accepted() -> None:
    author = Identity(bytes(32))
    roster = sorted(Identity(number.to_bytes(32, "big")).peer_id for number in range(limits.MAX_GROUP_MEMBERS))
    order = ResumeOrder(run="run", sequence=1, outer_step=STEP, state_digest=bytes(32), roster=tuple(roster))
    signatures = RunSignatures(identity=author, network_id="test", run="run", author=author.peer_id)
    certificate = Certificate(order=signatures.sign(order, NOW)).to_bytes()

    async def check(data: bytes) -> Proof:
        return signatures.check_certificate(data, NOW)

    async def main() -> None:
        service, told = make_service(STEP), list[object]()
        service.set_driver(cast(Any, SimpleNamespace(setup=SimpleNamespace(step=STEP + 1), feed=told.append)))
        service._context.check = check  # type: ignore[method-assign, misc, assignment]
        assert await service._on_resume("anyone", certificate) == b""
        assert told == [Proven(certificate=certificate)]

    virtual_time.run(main())


@pytest.mark.parametrize("method", ["_on_reduce", "_on_follow", "_on_bans", "_on_history"])
def test_stream_is_ended_when_its_peer_stays_silent(method: str) -> None:
    """The number of streams is bounded, so that silent ones would keep members out."""

    class Silent:
        async def receive(self) -> bytes:
            await asyncio.get_running_loop().create_future()
            raise AssertionError

    async def main() -> None:
        service = make_service(STEP - 1)
        async with asyncio.timeout(OPENING_S + 1.0):
            with pytest.raises(TimeoutError):
                await getattr(service, method)(COORDINATOR, Silent())

    virtual_time.run(main())


def test_stream_of_a_follower_is_ended_when_its_step_never_comes() -> None:
    class Follower:
        async def receive(self) -> bytes:
            return FollowRequest(run="run", step=STEP + 1000, state_digest=bytes(32)).to_bytes()

    async def main() -> None:
        service = make_service(STEP - 1)
        cast(Any, service._context).run = "run"
        async with asyncio.timeout(OPENING_S + 1.0):
            with pytest.raises(TimeoutError):
                await service._on_follow(COORDINATOR, cast(Any, Follower()))

    virtual_time.run(main())
