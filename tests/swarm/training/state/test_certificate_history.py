"""Tests the links from a trusted state to a later certificate after all members were replaced."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.training_swarm import certificate_of
from swarm.network.interface import Stream
from swarm.network.memory.memory_network import MemoryInternet
from swarm.testing import virtual_time
from swarm.training.round.quorum import Succession
from swarm.training.run.methods import Methods
from swarm.training.state import certificate_history as module
from swarm.training.state import proof_reader
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import CertificateHistory, Proof
from swarm.training.state.endorsement import Endorsements
from swarm.training.state.proof_reader import HISTORY_TIMEOUT_S, ProofReader
from swarm.training.state.state_sync import follows
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.member_messages import StandingRequest
from swarm_protocol.training_messages import Contribution, Group

NOW = 1_750_000_000.0
RULE = Succession(min_group=2)
SIGNERS = sorted(
    (
        RunSignatures(identity=Identity(bytes([n]) * 32), network_id="test", run="run", succession=RULE)
        for n in range(8)
    ),
    key=lambda each: each.identity.peer_id,
)
PEERS = [each.identity.peer_id for each in SIGNERS]


def link(step: int, members: Sequence[int], voters: Sequence[int] = ()) -> Proof:
    """Return the proof that `members` committed `step` by the votes of all of them, or of `voters`."""
    group = Group(
        run="run",
        step=step,
        attempt=0,
        state_digest=bytes([step]) * 32,
        members=tuple(Contribution(peer_id=PEERS[n], num_tokens=1, num_samples=1) for n in members),
        part_values=(1,) * len(members),
        reduce_s=1.0,
        vote_s=1.0,
    )
    signed = SIGNERS[members[0]].sign_group(group, NOW)
    outcome = Outcome(
        origin_digest=signed.digest, part_digests=(bytes(32),) * len(members), state_digest=bytes([step + 1]) * 32
    )
    data = certificate_of(signed, outcome, [SIGNERS[number] for number in voters or members])
    return SIGNERS[0].check_certificate(data, NOW)


@dataclass
class Laggard:
    """A replica at step 1, which members 0, 1 and 2 committed. The peer that it asks streams the certificates in
    `shown`."""

    shown: Sequence[Proof]
    pause_s: float = 0.0
    is_asked: bool = False

    def follows(self, proof: Proof) -> bool:
        return virtual_time.run(self._follows(proof))

    async def _follows(self, proof: Proof) -> bool:
        internet = MemoryInternet()
        mine, other = internet.network(), internet.network()
        self.history = CertificateHistory(RULE)
        replica = SimpleNamespace(
            anchors=(tuple(PEERS[:3]),),
            rank=link(1, (0, 1, 2)).rank,
            outer_step=1,
            order=None,
            is_new=False,
            history=self.history,
        )
        context: Any = SimpleNamespace(
            signatures=SIGNERS[0], replica=replica, run="run", network=mine, endorsements=Endorsements(), apart={}
        )
        reader = ProofReader(network=mine, signatures=SIGNERS[0], methods=Methods("run"))
        context.history, context.note_apart = reader.history, reader.note_apart
        await other.serve_stream(Methods("run").history, self._show)
        try:
            return await follows(context, other.peer_id, proof)
        finally:
            await mine.close()
            await other.close()

    async def _show(self, _peer: str, stream: Stream) -> None:
        self.is_asked = True
        await stream.receive()
        for each in self.shown:
            await asyncio.sleep(self.pause_s)
            await stream.send(each.certificate)


NEXT = link(2, (0, 1, 2, 3, 4), (0, 1, 3, 4))
LATER = link(3, (2, 3, 4, 5), (2, 3, 4, 5))
ALL_NEW = link(4, (4, 5, 6), (4, 5, 6))


def test_certificate_follows_at_once_with_two_thirds_of_the_own_states_members() -> None:
    laggard = Laggard([])
    assert laggard.follows(NEXT)
    assert not laggard.is_asked


def test_certificate_without_members_of_the_own_state_follows_by_the_links_between() -> None:
    # 4 of the 5 members of step 2 vote for step 3, which has four members, so that three would be two thirds
    bridge = link(3, (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5))
    last = link(4, (3, 4, 5, 6), (3, 4, 5, 6))
    laggard = Laggard([link(1, (0, 1, 2)), NEXT, bridge])
    assert laggard.follows(last)
    assert [each.outer_step for each in laggard.history.since(0)] == [2, 3]


@pytest.mark.parametrize("shown", [[], [LATER], [NEXT, LATER], [link(3, (5, 6, 7)), link(2, (5, 6, 7))]])
def test_certificate_does_not_follow_when_links_are_missing_or_wrong(shown: list[Proof]) -> None:
    laggard = Laggard(shown)
    assert not laggard.follows(ALL_NEW)
    assert laggard.is_asked
    assert not laggard.history.since(0)


def test_history_is_given_up_when_it_trickles_or_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Laggard([LATER] * 10, pause_s=HISTORY_TIMEOUT_S / 5).follows(ALL_NEW)
    monkeypatch.setattr("swarm.training.state.proof_reader.MAX_HISTORY_LINKS", 3)
    assert not Laggard([LATER] * 4 + [NEXT]).follows(ALL_NEW)


def test_history_beyond_its_bound_drops_links_that_its_neighbours_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HISTORY_LINKS", 3)
    steady = [link(step, (0, 1, 2)) for step in range(1, 5)]
    history = CertificateHistory(RULE, steady)
    assert [each.outer_step for each in history.since(0)] == [1, 3, 4]
    # all other links are needed to get from the first members to the last
    history.add([link(5, (0, 1, 2, 3, 4), (0, 1, 2, 3)), link(6, (3, 4, 5), (3, 4, 5))])
    assert len(history.since(0)) == 3
    assert history.since(6)
    monkeypatch.setattr(module, "MAX_HISTORY_BYTES", len(steady[0].certificate))
    history.add([link(7, (0, 1, 2))])
    assert len(history.since(0)) == 1


def test_replica_that_followed_both_of_two_states_of_a_step_contradicts_neither() -> None:
    """So it is in a run with a min_group of 1, and where two first groups became one."""
    one, other, third = (
        replace(proof, outcome=replace(proof.outcome, state_digest=bytes([number]) * 32))
        for number, proof in enumerate([link(1, (0, 1)), link(1, (2, 3, 4)), link(1, (5, 6))])
    )
    history = CertificateHistory(RULE, [one])
    assert history.contradicts(other.rank[:3], other.outcome.state_digest)
    history.add([other])
    contradicting = [p for p in (one, other, third) if history.contradicts(p.rank[:3], p.outcome.state_digest)]
    assert contradicting == [third]
    assert history.stays_apart(third)


def test_histories_without_an_outer_step_do_not_stay_apart() -> None:
    one, other = (
        replace(proof, origin=replace(proof.origin, members=tuple(map(idle, proof.origin.members)), part_values=()))
        for proof in (link(1, (0, 1)), link(1, (2, 3, 4)))
    )
    history = CertificateHistory(RULE, [one])
    assert history.contradicts(other.rank[:3], bytes(32))
    assert not history.stays_apart(replace(other, outcome=replace(other.outcome, state_digest=bytes(32))))


def idle(member: Contribution) -> Contribution:
    return replace(member, num_tokens=0, num_samples=0)


def test_large_certificate_is_checked_once_while_the_cache_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    num_checked = 0
    check = RunSignatures.check_certificate

    def counted(self: RunSignatures, data: bytes, now: float) -> Proof:
        nonlocal num_checked
        num_checked += 1
        return check(self, data, now)

    async def main() -> None:
        reader = ProofReader(network=MemoryInternet().network(), signatures=SIGNERS[0], methods=Methods("run"))
        one, other = (link(step, (0, 1)).certificate for step in (1, 2))
        monkeypatch.setattr(RunSignatures, "check_certificate", counted)
        monkeypatch.setattr(proof_reader, "SMALL_BYTES", 0)
        for _ in range(3):
            await reader.check(one)
        assert num_checked == 1
        monkeypatch.setattr(proof_reader, "MAX_REMEMBERED_BYTES", len(one) + len(other) - 1)
        await reader.check(other)  # this displaces the first one
        await reader.check(other)
        assert num_checked == 2
        await reader.check(one)
        assert num_checked == 3

    virtual_time.run(main())


def test_large_certificates_are_checked_off_the_loop_one_at_a_time_and_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers may show them, too. The event loop and one of a member's two threads for rounds must stay free."""
    monkeypatch.setattr(proof_reader, "SMALL_BYTES", 0)
    check, running, most, threads = RunSignatures.check_certificate, 0, 0, list[int]()

    def watched(self: RunSignatures, data: bytes, now: float) -> Proof:
        nonlocal running, most
        threads.append(threading.get_ident())
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return check(self, data, now)

    async def main() -> None:
        proofs = [link(step, (0, 1)) for step in range(1, 5)]
        monkeypatch.setattr(RunSignatures, "check_certificate", watched)
        with ThreadPoolExecutor(4) as executor:
            reader = ProofReader(
                network=MemoryInternet().network(), signatures=SIGNERS[0], methods=Methods("run"), executor=executor
            )
            found = await asyncio.gather(*(reader.check(proof.certificate) for proof in (*proofs, *proofs)))
        assert [each.outcome for each in found] == [proof.outcome for proof in proofs] * 2

    virtual_time.run(main(), jobs="threads")
    assert (most, len(threads)) == (1, 4)
    assert threading.get_ident() not in threads


def test_own_certificate_does_not_wait_for_checks_of_strangers_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member looks at 64 peers at one time, and each can show a certificate whose check takes a tenth of a second."""
    monkeypatch.setattr(proof_reader, "SMALL_BYTES", 0)
    check, goes_on = RunSignatures.check_certificate, threading.Event()

    async def main() -> None:
        own, *others = (link(step, (0, 1)) for step in range(1, 5))

        def slow(self: RunSignatures, data: bytes, now: float) -> Proof:
            if data != own.certificate:
                goes_on.wait()
            return check(self, data, now)

        monkeypatch.setattr(RunSignatures, "check_certificate", slow)
        with ThreadPoolExecutor(2) as executor:
            reader = ProofReader(
                network=MemoryInternet().network(), signatures=SIGNERS[0], methods=Methods("run"), executor=executor
            )
            waiting = [asyncio.create_task(reader.check(each.certificate)) for each in others]
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(60.0):
                    assert (await reader.check(own.certificate, is_own=True)).outcome == own.outcome
                assert not any(task.done() for task in waiting)
            finally:
                goes_on.set()
            await asyncio.gather(*waiting)

    asyncio.run(main())


def test_check_of_a_received_history_yields_to_other_tasks() -> None:
    """A stream may hold megabytes of links, each of which takes milliseconds."""
    links, turns = [link(step, (0, 1)).certificate for step in range(1, 30)], list[int]()

    class Arrived(ProofReader):
        async def _shown(self, *_: object, **__: object) -> AsyncGenerator[bytes, None]:
            for data in links:
                yield data

    async def main() -> None:
        reader = Arrived(network=MemoryInternet().network(), signatures=SIGNERS[0], methods=Methods("run"))

        async def others() -> None:
            while True:
                turns.append(len(read))
                await asyncio.sleep(0)

        read, beside = list[Proof](), asyncio.create_task(others())
        async for proof in reader.history("peer", StandingRequest(run="run", step=1)):
            read.append(proof)
        beside.cancel()
        assert len(read) == len(links)

    virtual_time.run(main())
    assert set(turns) >= set(range(1, len(links)))


def test_repeated_certificate_is_checked_once_and_an_invalid_one_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = list[bytes]()
    check = RunSignatures.check_certificate

    def counted(self: RunSignatures, data: bytes, now: float) -> Proof:
        checked.append(data)
        return check(self, data, now)

    async def main() -> None:
        reader = ProofReader(network=MemoryInternet().network(), signatures=SIGNERS[0], methods=Methods("run"))
        monkeypatch.setattr(RunSignatures, "check_certificate", counted)
        proofs = [link(step, (0, 1)) for step in range(1, proof_reader.MAX_REMEMBERED + 2)]
        checked.clear()
        for proof in (proofs[0], proofs[0], *proofs, proofs[-1]):
            assert (await reader.check(proof.certificate)).outcome == proof.outcome
        assert checked == [proof.certificate for proof in proofs]
        await reader.check(proofs[0].certificate)  # it was displaced by the others
        assert len(checked) == len(proofs) + 1
        for _ in range(2):
            with pytest.raises(PeerViolation):
                await reader.check(proofs[0].certificate + b"x")
        assert len(checked) == len(proofs) + 3

    virtual_time.run(main())
