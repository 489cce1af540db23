"""Tests that a member which missed a few outer steps follows by their parts, and not by a whole state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.replica_states import state_of
from support.training_swarm import (
    AUTHOR,
    NUM_VALUES,
    Swarm,
    assert_equal_steps,
    certificate_of,
    config,
    identity_of,
    interval_cost,
)
from swarm.network.interface import Stream, no_failpoints
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.testing import virtual_time
from swarm.training.allreduce.audit import Auditing
from swarm.training.member import outer_steps
from swarm.training.outside.resume import deliver, sign_order, survey
from swarm.training.round.quorum import Succession
from swarm.training.run.methods import Methods
from swarm.training.state import replica
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm.training.state.proof_reader import CALL_TIMEOUT_S, ProofReader
from swarm.training.state.run_context import RunContext
from swarm.training.state.state_sync import (
    MAX_CATCH_UP_LINKS,
    MAX_DONORS,
    SyncResult,
    _is_voted_for,
    catch_up,
    donors_of,
)
from swarm.training.state.state_transfer import Fetcher
from swarm.training.trainer_events import OuterStep, StateFetched
from swarm_compression import get_codec
from swarm_compression.codec import Data
from swarm_protocol.commit_messages import Outcome
from swarm_protocol.errors import RoundError
from swarm_protocol.identity import Identity
from swarm_protocol.records import TrainerRecord
from swarm_protocol.training_messages import Contribution, Group

ONLOOKER = Identity(b"onlooker".ljust(32))
STATE_BYTES = 8 * NUM_VALUES
NOW = 1_750_000_000.0

COST = partial(interval_cost, interval_s=4.0, other_s=0.001)


async def go_on_without(swarm: Swarm, peers: list[str]) -> None:
    """Have the run's author let `peers` go on without the others."""
    network = swarm.internet.network(ONLOOKER)
    situation = await survey(network, swarm.run, peers)
    order = sign_order(swarm.run, situation, peers, AUTHOR, network_id="test", now=network.now())
    assert await deliver(network, Methods(swarm.run.run_id).resume, order, peers[:1]) == {peers[0]: ""}
    await network.close()


def bytes_and_steps_of_a_member_that_was_away(*, is_resumed: bool = False) -> tuple[int, int]:
    """Return the bytes that a returning member fetched, and the steps that it had missed. With `is_resumed`, these
    steps follow from a resume order."""

    async def main() -> tuple[int, int]:
        async with Swarm(config(min_group=2, outer_steps=10, quorum_grace_s=3.0)) as swarm:
            members = [await swarm.join(f"m{number}") for number in range(4)]
            away = members[3]
            while not away.of(OuterStep):
                await asyncio.sleep(0.05)
            others = [member.peer_id for member in members[:3]]
            swarm.internet.partition([[*others, ONLOOKER.peer_id], [away.peer_id]])
            before = len(away.of(OuterStep))
            while is_resumed and len(members[0].of(OuterStep)) < before + 1:
                await asyncio.sleep(0.05)
            if is_resumed:
                await go_on_without(swarm, others)
            while len(members[0].of(OuterStep)) < before + 2:
                await asyncio.sleep(0.05)
            swarm.internet.heal()
            assert_equal_steps(await swarm.finish(), 10)
            fetched = away.of(StateFetched)[0]
            return fetched.num_bytes, fetched.step - max(
                event.step for event in away.of(OuterStep) if event.step < fetched.step
            )

    return virtual_time.run(main(), compute_s=COST)


@pytest.mark.parametrize("is_resumed", [False, True], ids=["usually", "with a resume order on the way"])
def test_member_follows_by_parts_when_it_missed_a_few_steps(is_resumed: bool) -> None:
    num_bytes, num_steps = bytes_and_steps_of_a_member_that_was_away(is_resumed=is_resumed)
    assert 2 <= num_steps <= replica.NUM_PARTS
    assert num_steps * NUM_VALUES <= num_bytes < 1.1 * num_steps * NUM_VALUES


def test_member_fetches_no_parts_while_it_audits_the_step_that_others_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    audit, fetched, late = Auditing.audit, list[str](), list[str]()

    async def late_audit(self: Auditing, parts: Sequence[Data], within_s: float) -> None:
        if self._streams.me == identity_of("m3").peer_id:
            late.append(self._streams.me)
            await asyncio.sleep(1000.0)
        await audit(self, parts, within_s)

    async def parts(*_: object) -> tuple[Data, ...]:
        fetched.append("parts")
        raise RoundError("nobody has them")

    monkeypatch.setattr(Auditing, "audit", late_audit)
    monkeypatch.setattr(Fetcher, "parts", parts)

    async def main() -> None:
        async with Swarm(config(min_group=4, outer_steps=2, aggregator="centered_clip")) as swarm:
            for number in range(4):
                await swarm.join(f"m{number}")
            assert_equal_steps(await swarm.finish(), 2)

    virtual_time.run(main())
    assert late
    assert not fetched


def test_member_trains_on_from_the_last_step_that_it_could_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missed steps are adopted one by one, and the parts of the last one may be gone."""
    real, stranded = outer_steps.fetch_state, list[int]()

    async def fetch_state(context: RunContext, membership: Membership, proof: Proof, *others: Any) -> SyncResult:
        reached = await real(context, membership, proof, *others)
        if proof.outer_step == 2 and not stranded:
            stranded.append(proof.outer_step)
            context.replica.adopt(reached.state, reached.proof)
            raise RoundError("what follows is gone")
        return reached

    monkeypatch.setattr(outer_steps, "fetch_state", fetch_state)

    async def main() -> None:
        async with Swarm(config(min_group=3, outer_steps=4)) as swarm:
            for number in range(3):
                await swarm.join(f"m{number}")
            members = await swarm.finish(timeout_s=120)
            assert_equal_steps(members, 4)
            assert {event.num_tokens for event in members[0].of(OuterStep)} == {3 * 40}

    virtual_time.run(main())
    assert stranded == [2]


def test_member_fetches_the_state_when_the_missed_parts_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "NUM_PARTS", 1)
    num_bytes, num_steps = bytes_and_steps_of_a_member_that_was_away()
    assert num_steps >= 2
    assert num_bytes == STATE_BYTES


def test_catch_up_gives_up_in_time_when_peers_trickle_links() -> None:
    """Each link arrives in time and leads nowhere."""

    async def drip(_peer: str, stream: Stream) -> None:
        for number in range(MAX_CATCH_UP_LINKS):
            await asyncio.sleep(0.9 * CALL_TIMEOUT_S)
            await stream.send(bytes([number]))

    class Reader(ProofReader):
        async def check(self, certificate: bytes) -> Any:
            return SimpleNamespace(is_order=False, outcome=SimpleNamespace(state_digest=certificate))

    async def main() -> None:
        internet = MemoryInternet()
        mine, *others = (internet.network() for _ in range(5))
        for network in others:
            await network.serve_stream(Methods("run").history, drip)
        present = SimpleNamespace(outer_step=1, digest=bytes(32), proof=object())
        context: Any = SimpleNamespace(network=mine, run="run", replica=present)
        context.history = Reader(network=mine, signatures=cast(Any, None), methods=Methods("run")).history
        wanted: Any = SimpleNamespace(origin=SimpleNamespace(state_digest=b"far"), voters=(), is_order=False)
        now = asyncio.get_running_loop().time
        started = now()
        assert await catch_up(context, wanted, [network.peer_id for network in others]) is None
        assert now() - started < 20.0
        for network in (mine, *others):
            await network.close()

    virtual_time.run(main())


def test_states_on_the_way_need_votes_of_the_members_before_or_of_those_that_a_later_order_names() -> None:
    present: Any = SimpleNamespace(is_new=False, order=None, anchors=(tuple("abcd"),), rank=(), outer_step=1)
    known = SimpleNamespace(newest=None)
    signatures = SimpleNamespace(succession=Succession(min_group=2))
    context: Any = SimpleNamespace(replica=present, endorsements=known, signatures=signatures)

    def link(members: str, *, named: str = "", sequence: int = 0) -> Any:
        order = SimpleNamespace(roster=tuple(named)) if named else None
        return SimpleNamespace(voters=tuple(members), roster=tuple(members), order=order, sequence=sequence)

    assert _is_voted_for(context, [link("abc"), link("bce"), link("ceg"), link("gex")]), "members change with each step"
    assert not _is_voted_for(context, [link("ab")])
    assert not _is_voted_for(context, [link("abc"), link("cxy"), link("cxy")])
    after_order = [link("abc"), link("cx", named="cx", sequence=1), link("cxy", named="cx", sequence=1)]
    assert _is_voted_for(context, after_order)
    assert not _is_voted_for(context, [*after_order, link("cxy")]), "without the order, of which the state before is"
    assert not _is_voted_for(context, [link("abc", named="xyz", sequence=1)])
    present.order = SimpleNamespace(sequence=1)
    assert not _is_voted_for(context, [link("xyz", named="xyz", sequence=1)]), "the order is known already"


def test_catch_up_adopts_no_state_that_strangers_made_up_on_the_way() -> None:
    """They show two groups of their own that only admit members, from this member's state to that before the
    newest."""
    keys = sorted((Identity(bytes([number]) * 32) for number in range(1, 7)), key=lambda each: each.peer_id)
    rule = Succession(min_group=2)
    signers = [RunSignatures(identity=each, network_id="test", run="run", succession=rule) for each in keys]
    honest, strangers = signers[:3], signers[3:]

    def committed(signers: Sequence[RunSignatures], step: int, before: bytes, after: bytes) -> Proof:
        members = tuple(Contribution(peer_id=each.identity.peer_id) for each in signers)
        group = Group(run="run", step=step, attempt=0, state_digest=before, members=members, reduce_s=1.0, vote_s=1.0)
        signed = signers[0].sign_group(group, NOW)
        outcome = Outcome(origin_digest=signed.digest, part_digests=(), state_digest=after)
        return signers[0].check_certificate(certificate_of(signed, outcome, signers), NOW)

    async def main() -> None:
        internet, methods = MemoryInternet(), Methods("run")
        mine, theirs = internet.network(), internet.network()
        roster = tuple(each.identity.peer_id for each in honest)
        state = state_of(torch.zeros(10), outer_step=1, roster=roster)
        member, stranger = (replica.Replica(config(min_group=2), state) for _ in range(2))
        member.adopt(state, committed(honest, 1, bytes(32), state.digest))
        with ThreadPoolExecutor(1) as executor:
            begun = committed(strangers, 2, state.digest, bytes(32)).origin
            made_up = (await stranger.propose(executor, bytes(32), begun, ())).state_digest
            assert made_up != state.digest
            before_newest, newest = b"before the newest".ljust(32), b"the newest".ljust(32)
            shown = (
                committed(strangers, 2, state.digest, made_up),
                committed(strangers, 2, made_up, before_newest),
            )

            async def show(_peer: str, stream: Stream) -> None:
                await stream.receive()
                for each in shown:
                    await stream.send(each.certificate)

            await theirs.serve_stream(methods.history, show)
            context = RunContext(
                network=mine,
                signatures=honest[0],
                methods=methods,
                executor=executor,
                replica=member,
                codec=get_codec("int8"),
                fetcher=Fetcher(mine, methods, executor),
                failpoints=no_failpoints,
            )
            proof = committed(honest, 3, before_newest, newest)
            assert await catch_up(context, proof, [theirs.peer_id]) is None
            assert member.digest == state.digest
        await mine.close()
        await theirs.close()

    virtual_time.run(main())


def test_strangers_on_fast_lines_that_claim_a_state_displace_no_more_than_half_of_its_voters_as_donors() -> None:
    voters, strangers = [f"voter {number}" for number in range(20)], [f"stranger {number}" for number in range(20)]
    links = SimpleNamespace(fastest_first=lambda peers: sorted(peers, key=lambda peer: peer in voters))
    network = SimpleNamespace(peer_id=voters[0], links=links)
    context: Any = SimpleNamespace(network=network, chance=random.Random(0))
    proof: Any = SimpleNamespace(voters=voters, outcome=SimpleNamespace(state_digest=b"s" * 32))
    record = TrainerRecord(run="run", outer_step=1, digest=b"s" * 32, state="training")
    draws = [donors_of(context, proof, dict.fromkeys([*strangers, *voters], record)) for _ in range(60)]
    assert all(len(donors) == len(set(donors)) == MAX_DONORS for donors in draws)
    assert all(sum(peer in voters for peer in donors) == MAX_DONORS // 2 for donors in draws)
    assert {peer for donors in draws for peer in donors if peer in voters} == set(voters[1:])
