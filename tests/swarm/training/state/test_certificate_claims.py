"""Tests which peers a member asks for their standing, and which history a newcomer follows."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from support.training_swarm import Member, Swarm, assert_equal_steps, certificate_of, certified, config, interval_cost
from swarm.network.membership import Membership
from swarm.testing import virtual_time
from swarm.training.run.methods import Methods
from swarm.training.state import state_sync
from swarm.training.state.ancestry import best_of, whom_a_newcomer_asks
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import (
    MAX_ASKED_FOR_STANDING,
    Proof,
    are_of_one_history,
    most_supported,
    whom_to_ask,
)
from swarm.training.state.state_sync import claims_of
from swarm.training.trainer_events import OuterStep, RoundAborted, StateFetched
from swarm_protocol.commit_messages import Endorsement, Outcome
from swarm_protocol.identity import Identity
from swarm_protocol.member_messages import Standing
from swarm_protocol.records import TrainerRecord
from swarm_protocol.training_messages import Contribution, Group

NOW = 1_750_000_000.0
SIGNERS = [RunSignatures(identity=Identity(bytes([number]) * 32), network_id="test", run="run") for number in range(8)]

RECORD_S = 70.0
"""The time after which nobody lists a member that is gone."""

MEMBERS = tuple(f"member {number:02}" for number in range(2 * MAX_ASKED_FOR_STANDING))


def test_members_are_asked_first_and_each_of_many_strangers_in_turn() -> None:
    """A stranger may be a member of a later state."""
    strangers, chance = [f"stranger {number}" for number in range(100)], random.Random(0)
    draws = [whom_to_ask([*strangers, *MEMBERS[:2]], MEMBERS, chance) for _ in range(60)]
    assert all(set(asked[:2]) == set(MEMBERS[:2]) for asked in draws)
    assert all(len(asked) == len(set(asked)) == MAX_ASKED_FOR_STANDING for asked in draws)
    assert {peer for asked in draws for peer in asked} == {*strangers, *MEMBERS[:2]}


def test_half_of_those_asked_are_members_when_there_are_many() -> None:
    asked = whom_to_ask([f"stranger {number}" for number in range(10**4)] + list(MEMBERS), MEMBERS, random.Random(0))
    assert [peer in MEMBERS for peer in asked].count(True) == MAX_ASKED_FOR_STANDING // 2


def test_newcomer_without_an_endorsement_asks_the_same_sample_of_all_each_time() -> None:
    peers = [f"stranger {number}" for number in range(40)] + list(MEMBERS)
    asked, again, of_another = (whom_a_newcomer_asks(peers, None, me, random.Random()) for me in ("me", "me", "you"))
    assert len(asked) == len(set(asked)) == MAX_ASKED_FOR_STANDING
    assert asked == again != of_another
    assert 4 <= sum(peer in MEMBERS for peer in asked) <= 12


def test_only_admitted_peers_claims_count_in_a_closed_run() -> None:
    """A newcomer would otherwise ask only strangers, whose keys cost nothing."""
    strangers = [Identity(bytes([number + 100]) * 32).peer_id for number in range(100)]
    admitted = tuple(each.identity.peer_id for each in SIGNERS[:3])
    signatures = replace(SIGNERS[0], admission=admitted)
    records = {
        peer: TrainerRecord(run="run", outer_step=3, digest=bytes(32), state="training")
        for peer in (*strangers, *admitted)
    }
    context = SimpleNamespace(network=SimpleNamespace(peer_id=admitted[0]), signatures=signatures)
    claims = claims_of(context, records)  # type: ignore[arg-type]
    assert sorted(whom_to_ask(claims, (), random.Random())) == sorted(admitted[1:])


HONEST, FORGERS = range(5), range(5, 7)


def shown_by(members: range, proof: Proof) -> dict[str, Proof]:
    return {SIGNERS[number].identity.peer_id: proof for number in members}


def certificate(members: range, step: int, *, leaving: tuple[int, ...] = (), order: bytes = b"") -> Proof:
    peers = sorted(SIGNERS[number].identity.peer_id for number in members)
    gone = {SIGNERS[number].identity.peer_id for number in leaving}
    group = Group(
        run="run",
        step=step,
        attempt=0,
        state_digest=bytes([step]) * 32,
        members=tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1, leaving=peer in gone) for peer in peers),
        part_values=(1,) * len(peers),
        reduce_s=1.0,
        vote_s=1.0,
        order=order,
    )
    signed = SIGNERS[members[0]].sign_group(group, NOW)
    state = bytes([step + 1, members[0]]) * 16
    outcome = Outcome(origin_digest=signed.digest, part_digests=(bytes(32),) * len(peers), state_digest=state)
    voters = [number for number in members if number not in leaving or number in FORGERS]
    data = certificate_of(signed, outcome, [SIGNERS[number] for number in voters])
    return SIGNERS[0].check_certificate(data, NOW)


def test_most_supported_is_the_certificate_of_most_voters_and_not_the_furthest_claim() -> None:
    honest, forged = certificate(HONEST, 4), certificate(FORGERS, 200)
    assert most_supported(shown_by(HONEST, honest) | shown_by(FORGERS, forged)) == honest
    # peers that show a certificate without having voted for it do not support it
    assert most_supported(shown_by(range(2), honest) | shown_by(range(6, 8), forged)) == honest
    assert most_supported({}) is None
    assert most_supported(shown_by(FORGERS, forged)) == forged, (
        "without other certificates there is nothing to compare with"
    )


def test_most_supported_is_the_newest_certificate_of_the_shared_history() -> None:
    before, newest, forged = certificate(HONEST, 4), certificate(HONEST, 5), certificate(FORGERS, 200)
    shown = shown_by(HONEST, before) | shown_by(range(1), newest) | shown_by(FORGERS, forged)
    assert most_supported(shown) == newest


def test_newest_certificate_counts_of_those_that_follow_from_the_endorsed_state() -> None:
    """Former members may show the state that they left, and be more than the later ones that answer."""
    endorsement = Endorsement(
        run="run", sequence=1, outer_step=1, state_digest=bytes(32), roster=(SIGNERS[0].identity.peer_id,)
    )
    before, newest = certificate(range(4), 4), certificate(range(4, 8), 9)
    shown = shown_by(range(4), before) | shown_by(range(7, 8), newest)
    assert best_of(shown, None) == before
    assert best_of(shown, endorsement) == newest
    assert best_of({}, endorsement) is None


def test_forged_group_shares_no_history_with_an_honest_member_that_it_names() -> None:
    """It states that the forgers leave, so that its roster is the honest member alone, which does not have to vote."""
    honest, forged = certificate(HONEST, 4), certificate(range(4, 7), 200, leaving=(5, 6))
    assert forged.roster == (SIGNERS[4].identity.peer_id,)
    assert not are_of_one_history(honest, forged)


async def strangers(swarm: Swarm, stack: AsyncExitStack, asked: list[str]) -> list[str]:
    """Start two fresh keys that show a certificate of a last state which they do not have. Return their peer ids.
    `asked` gets the peers that they have shown it to."""
    keys = [Identity(bytes([100 + number]) * 32) for number in range(2)]
    signers = [RunSignatures(identity=each, network_id="test", run=swarm.run.run_id) for each in keys]
    forged = certified(signers, 12, NOW)
    digest = SIGNERS[0].identity.peer_id.encode().ljust(32)[:32]
    standing = Standing(outer_step=12, state_digest=digest, certificate=forged).to_bytes()

    async def answer(peer: str, _request: bytes) -> bytes:
        asked.append(peer)
        return standing

    for each in keys:
        network = swarm.internet.network(each)
        stack.push_async_callback(network.close)
        await network.serve(Methods(swarm.run.run_id).standing, answer)
        membership = await stack.enter_async_context(Membership(network))
        membership.announce(TrainerRecord(run=swarm.run.run_id, outer_step=12, digest=digest, state="training"))
    return [each.peer_id for each in keys]


def test_newcomer_does_not_follow_two_fresh_keys_that_claim_to_be_furthest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, logger="swarm")

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=12)) as swarm, AsyncExitStack() as stack:
            for number in range(4):
                await swarm.join(f"m{number}")
            while not all(member.of(OuterStep) for member in swarm.members.values()):
                await asyncio.sleep(0.05)
            asked = list[str]()
            await strangers(swarm, stack, asked)
            await asyncio.sleep(1.0)
            newcomer = await swarm.join("newcomer")
            members = await swarm.finish()
            assert asked
            assert_equal_steps(members, 12)
            assert newcomer.of(StateFetched)
            assert not any("it was committed" in event.reason for event in newcomer.of(RoundAborted))

    virtual_time.run(main(), compute_s=lambda work: 1.0 if getattr(work, "__name__", "") == "_stretch" else 0.0)


@pytest.mark.parametrize("has_begun_to_form", [False, True])
def test_strangers_that_show_a_state_and_do_not_give_it_hold_up_the_start_of_a_run_only_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_begun_to_form: bool
) -> None:
    """Members that have no state cannot tell them from members of the run that are cut off."""
    caplog.set_level(logging.ERROR, logger="swarm")
    monkeypatch.setattr(state_sync, "GONE_S", 40.0)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=12)) as swarm, AsyncExitStack() as stack:
            if has_begun_to_form:
                await swarm.join("m0")
                await asyncio.sleep(5.0)
            keys = await strangers(swarm, stack, asked := [])
            await asyncio.sleep(1.0)
            members = [swarm.members.get(name) or await swarm.join(name) for name in ("m0", "m1", "m2")]
            await asyncio.sleep(10.0)
            for member in members:
                assert member.peer_id in asked
                assert member.trainer.waiting is not None
                assert set(member.trainer.waiting.peers) == set(keys)
            for key in keys:
                swarm.internet.crash(key, detection_s=0.0)
            await asyncio.sleep(20.0)
            assert not any(member.of(OuterStep) for member in members)
            assert_equal_steps(await swarm.finish(timeout_s=100.0), 12)

    virtual_time.run(main(), compute_s=interval_cost)


def roster(member: Member) -> tuple[str, ...]:
    return member.trainer.replica.roster if member.trainer.replica else ()


def test_returning_member_catches_up_when_its_members_have_left_and_many_fresh_keys_claim_to_be_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They can show no state that follows from its own, and nobody else may be kept from it by their claims."""
    caplog.set_level(logging.ERROR, logger="swarm")

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=20)) as swarm, AsyncExitStack() as stack:
            old = [await swarm.join(f"old{number}") for number in range(3)]
            while not all(member.of(OuterStep) for member in old):
                await asyncio.sleep(0.05)
            state, certificate = old[0].trainer.state, old[0].trainer.certificate
            new = [await swarm.join(f"new{number}") for number in range(3)]
            while not all(member.peer_id in roster(new[0]) for member in new):
                await asyncio.sleep(0.05)
            for member in old:
                member.trainer.stop()
            for member in await swarm.finish(*(member.name for member in old)):
                swarm.kill(member.name)
            await asyncio.sleep(RECORD_S)
            for number in range(2 * MAX_ASKED_FOR_STANDING):
                network = swarm.internet.network(Identity(bytes([100 + number]) * 32))
                stack.push_async_callback(network.close)
                membership = await stack.enter_async_context(Membership(network))
                membership.announce(
                    TrainerRecord(run=swarm.run.run_id, outer_step=10**6, digest=b"f" * 32, state="training")
                )
            await asyncio.sleep(1.0)
            assert new[0].of(OuterStep)[-1].step < 18, "the others still train"
            returning = await swarm.join("returning", state=state, certificate=certificate)
            assert_equal_steps(await swarm.finish(returning.name, *(member.name for member in new)), 20)

    virtual_time.run(main(), compute_s=partial(interval_cost, interval_s=10.0))
