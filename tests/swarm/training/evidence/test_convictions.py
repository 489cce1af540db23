"""Tests that a member believes only evidence about steps that its run has taken, and keeps few bans of peers that it
does not know."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.kept_evidence import KeptEvidence
from support.made_up_interval import LIARS, VALIDATED, VICTIM, accusation
from support.training_swarm import certificate_of, config
from support.wrong_reduction import IDENTITIES, NOW, RUN, STRANGER, reduced, signatures, times_minus_ten
from swarm.network.memory.memory_network import MemoryInternet
from swarm.network.memory.memory_stream import StreamEnd
from swarm.testing import virtual_time
from swarm.training.evidence import bans, wrong_interval
from swarm.training.evidence import convictions as convictions_module
from swarm.training.evidence.bans import Ban, Verdict
from swarm.training.evidence.convictions import MAX_SHOWING, Convictions
from swarm.training.member.round_service import RoundService
from swarm.training.run.methods import Methods
from swarm.training.run.run_config import RunConfig
from swarm.training.state.certificate_history import Proof
from swarm_protocol import limits
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.errors import PeerRefused, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import EVIDENCE_WANTED, Evidence, EvidenceRequest
from swarm_protocol.training_messages import Contribution, Group

SENDER = LIARS[0].peer_id


def convictions(
    history: tuple[Proof, ...] = (),
    *,
    run: RunConfig = VALIDATED,
    roster: tuple[str, ...] = (),
    outer_step: int = 1,
    store: KeptEvidence | None = None,
) -> Convictions:
    """Return the convictions of a member that has committed this `history`."""
    replica = SimpleNamespace(
        config=run,
        outer_step=outer_step,
        roster=roster,
        current=SimpleNamespace(manifest=SimpleNamespace(stripes=())),
        history=SimpleNamespace(since=lambda step: [link for link in history if link.outer_step >= step]),
    )
    context = SimpleNamespace(
        replica=replica,
        signatures=signatures(),
        network=SimpleNamespace(peer_id=STRANGER.peer_id, now=lambda: NOW),
        executor=ThreadPoolExecutor(1),
    )
    return Convictions(context, lambda _: None, store, lambda _: None)  # type: ignore[arg-type]


def proof_of(certificate: bytes) -> Proof:
    proof: Proof = signatures().check_certificate(certificate, NOW)
    return proof


def banned(member: Convictions, data: bytes) -> frozenset[str]:
    asyncio.run(member.take(data, SENDER, passes_on=False))
    return member.peers


def test_accusation_convicts_nobody_when_it_contradicts_the_members_history() -> None:
    real = proof_of(accusation((VICTIM, *LIARS), finders=tuple(LIARS[::-1])).certificate)
    made_up = accusation(tuple(LIARS), on_probation=(VICTIM,)).evidence().to_bytes()
    assert not banned(convictions((real,)), made_up)


def test_older_members_take_evidence_of_a_newcomer_that_passed_on_a_made_up_step_before() -> None:
    made_up = accusation((VICTIM, *LIARS)).evidence().to_bytes()
    assert banned(convictions(), made_up) == {VICTIM.peer_id}, (
        "a newcomer has no history that contradicts the made-up step"
    )
    real = proof_of(accusation(tuple(LIARS), on_probation=(VICTIM,)).certificate)
    older, (liar, lie) = convictions((real,)), self_conviction()
    assert not banned(older, made_up)
    assert banned(older, lie) == {liar}, "genuine evidence of the same newcomer was refused"


def test_accusation_of_an_unknown_step_convicts_only_with_the_vote_of_the_accused() -> None:
    known = {"roster": (VICTIM.peer_id,)}
    assert not banned(convictions(**known), accusation(tuple(LIARS), on_probation=(VICTIM,)).evidence().to_bytes())  # type: ignore[arg-type]
    assert banned(convictions(**known), accusation((VICTIM, *LIARS)).evidence().to_bytes()) == {VICTIM.peer_id}  # type: ignore[arg-type]


def test_accusation_of_a_committed_step_convicts_without_the_vote_of_the_accused() -> None:
    evidence = accusation(tuple(LIARS), on_probation=(VICTIM,))
    member = convictions((proof_of(evidence.certificate),))
    assert banned(member, evidence.evidence().to_bytes()) == {VICTIM.peer_id}


def self_conviction() -> tuple[str, bytes]:
    case = reduced()
    return IDENTITIES[1].peer_id, case.evidence(times_minus_ten(case.result())).evidence().to_bytes()


def test_senders_of_worthless_evidence_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convictions_module, "MAX_IGNORED", 2)
    member = convictions()
    for sender in ("one", "two", "three"):
        with pytest.raises(PeerViolation):
            asyncio.run(member.take(b"nothing", sender, passes_on=False))
    assert list(member._ignored) == ["two", "three"]


def test_bans_of_strangers_are_bounded_and_never_about_future_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, data = self_conviction()
    assert banned(convictions(run=RUN), data) == {peer}
    monkeypatch.setattr(bans, "MAX_STRANGERS", 0)
    assert banned(convictions(run=RUN), data) == frozenset()
    assert banned(convictions(run=RUN, roster=(peer,)), data) == {peer}
    assert banned(convictions(run=RUN, roster=(peer,), outer_step=-1), data) == frozenset(), (
        "step 1 lies in this member's future"
    )


def test_evidence_is_taken_from_a_member_that_showed_a_kind_of_a_newer_version_before() -> None:
    peer, data = self_conviction()
    member = convictions(run=RUN)
    assert not banned(member, Evidence(kind="wrong_tokens", body=b"x").to_bytes())
    assert banned(member, data) == {peer}


def test_evidence_is_deleted_from_disk_when_its_ban_is_displaced_or_over(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, data = self_conviction()
    store = KeptEvidence()
    member = convictions(run=RUN, store=store)
    assert banned(member, data) == {peer}
    assert set(store) == {peer}
    monkeypatch.setattr(limits, "MAX_BANS", 1)
    member._bans.add(Verdict(peer_id="later", step=9, kind="wrong_reduction", reason="it lied"), b"")
    asyncio.run(member._keep("later", b"later"))
    assert set(store) == {"later"}
    over = KeptEvidence({peer: data})
    asyncio.run(convictions(run=config(aggregator="centered_clip", ban_steps=2), outer_step=9, store=over).recall())
    assert not over


def test_evidence_of_a_known_ban_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = accusation((VICTIM, *LIARS)).evidence().to_bytes()
    member = convictions(roster=(VICTIM.peer_id,))
    assert banned(member, data) == {VICTIM.peer_id}
    monkeypatch.delattr(wrong_interval, "read_case")
    assert banned(member, data) == {VICTIM.peer_id}


def test_accusation_with_too_few_findings_is_checked_once_when_several_peers_pass_it_on() -> None:
    one, two = (accusation((VICTIM, *LIARS), finders=finders) for finders in ((LIARS[0],), tuple(LIARS)))
    member, checked, reading = convictions(roster=(VICTIM.peer_id,)), list[bytes](), wrong_interval.read_case

    def read_case(body: bytes, *rest: object) -> object:
        checked.append(body)
        return reading(body, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrong_interval, "read_case", read_case)
        for data in (one, one, one):
            assert not banned(member, data.evidence().to_bytes())
        assert len(checked) == 1
        assert banned(member, two.evidence().to_bytes()) == {VICTIM.peer_id}
        assert len(checked) == 2


def certificates_that_differ(strangers: list[Identity], step: int = 2) -> tuple[bytes, bytes]:
    """Return two certificates of one made-up group, in which all members have voted twice."""
    signers = [signatures(each) for each in strangers]
    group = Group(
        run="run",
        step=step,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=peer) for peer in sorted(each.peer_id for each in strangers)),
        reduce_s=1.0,
        vote_s=1.0,
    )
    signed = signers[0].sign_group(group, NOW)
    one, other = (
        Outcome(origin_digest=signed.digest, part_digests=(), state_digest=name * 32) for name in (b"o", b"p")
    )
    return certificate_of(signed, one, signers), certificate_of(signed, other, signers)


def test_bans_are_not_displaced_by_keys_that_convict_themselves_in_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strangers = [Identity(bytes([number]) * 32) for number in range(100, 108)]
    monkeypatch.setattr(bans, "MAX_STRANGERS", 3)

    def convicted(roster: tuple[str, ...], step: int) -> frozenset[str]:
        async def main() -> frozenset[str]:
            member = convictions(run=config(min_group=2), roster=roster)
            for certificate in certificates_that_differ(strangers, step):
                signatures().check_certificate(certificate, NOW)
                member.hear(certificate)
            await asyncio.gather(*member._working)
            return member.peers

        return asyncio.run(main())

    assert convicted((strangers[0].peer_id,), step=2) == {strangers[0].peer_id}, (
        "only members of the roster are convicted"
    )
    assert len(convicted((), step=2)) == 3, "before the first group, the number of strangers is bounded"
    assert not convicted((), step=9), "a ban about a future step would outlast the others"


def test_conviction_counts_when_its_sender_leaves_while_it_is_written_to_disk() -> None:
    peer, data = self_conviction()
    begun, goes_on, told = threading.Event(), threading.Event(), list[Ban]()

    class SlowDisk(KeptEvidence):
        def keep(self, peer_id: str, evidence: bytes) -> None:
            begun.set()
            goes_on.wait()
            super().keep(peer_id, evidence)

    async def main() -> None:
        member = convictions(run=RUN, store=SlowDisk())
        member._on_new = told.append
        taking = asyncio.create_task(member.take(data, SENDER, passes_on=False))
        await asyncio.to_thread(begun.wait)
        taking.cancel()
        await asyncio.wait({taking})
        goes_on.set()
        assert taking.cancelled()

    asyncio.run(main())
    assert [ban.verdict.peer_id for ban in told] == [peer]


def test_conviction_is_completed_when_the_attempt_that_found_it_ends() -> None:
    """A liar could otherwise end the attempt by leaving it, before anything was checked."""
    peer, data = self_conviction()
    told, store = list[Ban](), KeptEvidence()
    member = convictions(run=RUN, store=store)
    member._on_new = told.append

    async def main() -> None:
        attempt = asyncio.create_task(member.convict([Evidence.from_bytes(data)]))
        while not member._working:
            await asyncio.sleep(0)
        attempt.cancel()
        await asyncio.wait({attempt, *member._working})
        assert attempt.cancelled()

    asyncio.run(main())
    assert [ban.verdict.peer_id for ban in told] == [peer]
    assert member.peers == set(store) == {peer}


def test_evidence_is_shown_to_others_while_one_peer_holds_several_streams_of_it() -> None:
    _, data = self_conviction()
    shown = list[bytes]()

    async def main() -> None:
        member = convictions(run=RUN)
        context: Any = member._context
        context.run = "run"
        await member.take(data, SENDER, passes_on=False)

        async def stalls(_data: bytes) -> None:
            await asyncio.sleep(3600.0)

        async def takes(shown_data: bytes) -> None:
            shown.append(shown_data)

        request = EvidenceRequest(run="run")
        async with asyncio.TaskGroup() as tasks:
            stalling: Any = SimpleNamespace(send=stalls)
            answers = [member.answer("greedy", request, stalling) for _ in range(MAX_SHOWING)]
            held = [tasks.create_task(refused_or_late(answer)) for answer in answers]
            await asyncio.sleep(0.0)
            taking: Any = SimpleNamespace(send=takes)
            await member.answer("honest", request, taking)
        assert Counter(task.result() for task in held) == {"PeerRefused": MAX_SHOWING - 1, "TimeoutError": 1}

    virtual_time.run(main())
    assert shown == [data]


async def refused_or_late(answering: Coroutine[Any, Any, None]) -> str:
    with pytest.raises((PeerRefused, TimeoutError)) as caught:
        await answering
    return type(caught.value).__name__


def test_evidence_reaches_all_members_over_a_slow_uplink() -> None:
    took, methods = set[str](), Methods("run")

    async def main() -> None:
        internet = MemoryInternet()
        mine = internet.network(STRANGER, up_bytes_per_s=750e3)
        others = [internet.network() for _ in range(12)]

        async def wants(_peer: str, _offer: bytes) -> bytes:
            return EVIDENCE_WANTED

        async def take(_peer: str, data: bytes, *, taker: str) -> bytes:
            assert len(data) == 1 << 20
            took.add(taker)
            return b""

        for network in others:
            await network.serve(methods.evidence, partial(take, taker=network.peer_id))
            await network.serve(methods.evidence_offer, wants)
        member = convictions()
        context: Any = member._context
        context.network, context.methods = mine, methods
        member._send(bytes(1 << 20), SENDER, 1, [network.peer_id for network in others])
        await asyncio.gather(*member._working)
        assert took == {network.peer_id for network in others}
        for network in (mine, *others):
            await network.close()

    virtual_time.run(main())


@pytest.mark.parametrize("num_finders", [1, 16])
def test_conviction_costs_each_member_only_a_few_uploads_of_the_evidence(
    num_finders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, data = self_conviction()
    sent, send = Counter[str](), StreamEnd.send

    async def counted(end: StreamEnd, message: bytes) -> None:
        sent[end.other.peer_id] += len(message)
        await send(end, message)

    monkeypatch.setattr(StreamEnd, "send", counted)

    async def main() -> None:
        internet = MemoryInternet()
        networks = [internet.network(up_bytes_per_s=len(data)) for _ in range(32)]
        roster = tuple(network.peer_id for network in networks)
        members = list[Convictions]()
        for network in networks:
            member = convictions(run=RUN, roster=(*roster, peer))
            context: Any = member._context
            context.network, context.methods = network, Methods("run")
            await RoundService(context, member).open()
            members.append(member)
        async with asyncio.TaskGroup() as tasks:
            for member in members[:num_finders]:
                tasks.create_task(member.convict([Evidence.from_bytes(data)]))
        while any(member._working for member in members):
            await asyncio.sleep(1.0)
        assert all(member.peers == {peer} for member in members)
        for network in networks:
            await network.close()

    virtual_time.run(main())
    assert max(sent.values()) < 12 * len(data), "one member sent the evidence to nearly all others"
    assert sum(sent.values()) < 32 * 4 * len(data)
