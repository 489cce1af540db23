"""Tests endorsements of a run's author: a node without a state begins at the newest one, whatever other keys show."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from support.training_swarm import (
    AUTHOR,
    Swarm,
    assert_equal_steps,
    certificate_of,
    config,
    identity_of,
    interval_cost,
    signed,
)
from swarm.network.interface import Stream
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryNetwork
from swarm.testing import virtual_time
from swarm.training.outside.observer import Observer
from swarm.training.outside.resume import RunSurvey, deliver, sign_survey, survey
from swarm.training.run.methods import Methods
from swarm.training.state.ancestry import LATE_S, STRANGERS_S, Anchor, links_from
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm.training.state.endorsement import (
    Endorsements,
    read_endorsement,
)
from swarm.training.state.proof_reader import ProofReader
from swarm.training.trainer_events import OuterStep, RoundAborted, StateEndorsed, StateFetched
from swarm_protocol.commit_messages import Endorsement, Outcome
from swarm_protocol.envelope import unverified
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.member_messages import Standing
from swarm_protocol.records import TrainerRecord
from swarm_protocol.training_messages import Contribution, Group

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NOW = 1_750_000_000.0
ONLOOKER = Identity(b"onlooker".ljust(32))
NUM_STEPS = 12
NUM_KEYS = 40
"""The number of fresh keys of the forgers: more than ten for each honest member."""
SIGNERS = RunSignatures(identity=AUTHOR, network_id="test", run="run", author=AUTHOR.peer_id)
ENDORSEMENT = Endorsement(run="run", sequence=7, outer_step=3, state_digest=bytes([3]) * 32, roster=(ONLOOKER.peer_id,))


async def founded(swarm: Swarm, num_members: int) -> None:
    for index in range(num_members):
        await swarm.join(f"m{index}")
    while not all(member.of(OuterStep) for member in swarm.members.values()):
        await asyncio.sleep(0.05)


async def look(swarm: Swarm, network: MemoryNetwork) -> RunSurvey:
    async with Membership(network) as membership:
        await asyncio.sleep(1.0)
        return await survey(network, swarm.run, await membership.trainers(swarm.run.run_id))


async def endorsed(swarm: Swarm) -> bytes:
    """Endorse the newest state, and give it to one member."""
    network = swarm.internet.network(ONLOOKER)
    found = await look(swarm, network)
    data = sign_survey(swarm.run, found, AUTHOR, network_id="test", now=network.now())
    target = next(iter(swarm.members.values())).peer_id
    assert await deliver(network, Methods(swarm.run.run_id).endorse, data, [target]) == {target: ""}
    await network.close()
    return data


def forged(voters: Sequence[Identity], run: str, step: int, state_digest: bytes, roster: Sequence[str] = ()) -> bytes:
    """Return a certificate of this state of `step` with votes of all `voters`. With `roster`, the others of the roster
    have no vote, as their probation ends, and the other voters leave."""
    signers = [RunSignatures(identity=each, network_id="test", run=run) for each in voters]
    peers = {each.peer_id for each in voters}
    works = {"num_tokens": 1, "num_samples": 1}
    members = [Contribution(peer_id=peer, **works, leaving=bool(roster) and peer not in roster) for peer in peers]
    members += [Contribution(peer_id=peer, **works, steps_left=1) for peer in roster if peer not in peers]
    group = Group(
        run=run,
        step=step,
        attempt=0,
        state_digest=b"f" * 32,
        members=tuple(sorted(members, key=lambda each: each.peer_id)),
        part_values=(1,) * len(members),
        reduce_s=1.0,
        vote_s=1.0,
    )
    signed, parts = signers[0].sign_group(group, NOW), (bytes(32),) * len(members)
    outcome = Outcome(origin_digest=signed.digest, part_digests=parts, state_digest=state_digest)
    return certificate_of(signed, outcome, signers)


async def forgers(
    swarm: Swarm,
    stack: AsyncExitStack,
    num_keys: int,
    asked: list[str],
    endorsement: bytes = b"",
    liar: Identity | None = None,
    *,
    trickles: bool = False,
) -> None:
    """Start `num_keys` fresh keys that all claim to be further than all members, and endorsed, and show a certificate:
    of the state of this `endorsement`, as if it was that of a later step, or of a made-up state. With a `liar` of the
    endorsed roster, the certificate is of the endorsed step and roster. With `trickles`, they show histories without
    an end."""
    keys = [Identity(b"forger" + number.to_bytes(26, "big")) for number in range(num_keys)]
    voters, place = keys[: min(num_keys, 13)], (NUM_STEPS, b"g" * 32)
    if endorsement:
        copied = Endorsement.from_bytes(unverified(endorsement).payload)
        place = (copied.outer_step if liar else NUM_STEPS, copied.state_digest)
    digest = place[1]
    if liar is None:
        certificate = forged(voters, swarm.run.run_id, *place)
    else:
        certificate = forged([*voters, liar], swarm.run.run_id, *place, copied.roster)
    standing = Standing(
        outer_step=NUM_STEPS, state_digest=digest, certificate=certificate, endorsement=endorsement
    ).to_bytes()

    async def answer(peer: str, _request: bytes) -> bytes:
        asked.append(peer)
        return standing

    async def trickle(_peer: str, stream: Stream) -> None:
        while True:
            await stream.send(certificate)
            await asyncio.sleep(1.0)

    for each in keys:
        network = swarm.internet.network(each)
        stack.push_async_callback(network.close)
        await network.serve(Methods(swarm.run.run_id).standing, answer)
        if trickles:
            await network.serve_stream(Methods(swarm.run.run_id).history, trickle)
        membership = await stack.enter_async_context(Membership(network))
        membership.announce(
            TrainerRecord(
                run=swarm.run.run_id, outer_step=NUM_STEPS, digest=digest, state="training", endorsed_step=NUM_STEPS
            )
        )
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("copies_digest", [False, True])
def test_newcomer_follows_no_fresh_keys_when_the_open_run_is_endorsed(copies_digest: bool) -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm, AsyncExitStack() as stack:
            await founded(swarm, 3)
            endorsement = await endorsed(swarm)
            await asyncio.sleep(6.0)
            asked = list[str]()
            await forgers(swarm, stack, NUM_KEYS, asked, endorsement if copies_digest else b"")
            newcomer = await swarm.join("newcomer")
            members = await swarm.finish()
            assert newcomer.peer_id in asked
            assert newcomer.of(StateFetched)
            assert_equal_steps(members, NUM_STEPS)
            assert not any("it was committed" in event.reason for event in newcomer.of(RoundAborted))

    virtual_time.run(main(), compute_s=interval_cost)


def test_newcomer_of_an_endorsed_run_waits_briefly_for_fresh_keys_whose_histories_trickle() -> None:
    async def main() -> float:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm, AsyncExitStack() as stack:
            await founded(swarm, 3)
            await endorsed(swarm)
            await asyncio.sleep(6.0)
            asked, now_s = list[str](), asyncio.get_running_loop().time
            await forgers(swarm, stack, 5, asked, trickles=True)
            began_s, newcomer = now_s(), await swarm.join("newcomer")
            while not newcomer.of(StateFetched):
                await asyncio.sleep(0.1)
            assert newcomer.peer_id in asked
            return now_s() - began_s

    assert virtual_time.run(main(), compute_s=interval_cost) < 2 * STRANGERS_S + LATE_S  # it looks twice


def test_newcomer_is_deceived_by_fresh_keys_when_the_run_is_not_endorsed() -> None:
    """This is the attack that endorsements prevent: without one, the newcomer tries to get the forgers' state."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=60)) as swarm, AsyncExitStack() as stack:
            await founded(swarm, 3)
            await forgers(swarm, stack, NUM_KEYS, [])
            newcomer = await swarm.join("newcomer")
            while not newcomer.of(RoundAborted):
                await asyncio.sleep(0.1)
            assert "it was committed" in newcomer.of(RoundAborted)[0].reason

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize("copies_digest", [False, True])
def test_observer_and_export_ignore_fresh_keys_when_the_run_is_endorsed(copies_digest: bool) -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=60)) as swarm, AsyncExitStack() as stack:
            await founded(swarm, 3)
            endorsement = await endorsed(swarm)
            await asyncio.sleep(6.0)
            await forgers(swarm, stack, NUM_KEYS, [], endorsement if copies_digest else b"")
            network = swarm.internet.network(ONLOOKER)
            stack.push_async_callback(network.close)
            membership = await stack.enter_async_context(Membership(network))
            await asyncio.sleep(1.0)
            observer = Observer(network, membership, swarm.run)
            honest = {member.peer_id for member in swarm.members.values()}
            for _ in range(3):
                for step in await observer.look(await observer.members()):
                    assert set(step.group) <= honest
                await asyncio.sleep(3.0)
            assert 0 < observer.outer_step < 60
            assert observer.endorsement is not None
            found = await survey(network, swarm.run, await membership.trainers(swarm.run.run_id))
            assert set(found.holders) <= honest

    virtual_time.run(main(), compute_s=interval_cost)


def test_newcomer_passes_the_endorsed_state_when_one_of_its_members_certifies_it_again_with_fresh_keys() -> None:
    """The fresh keys are more than the members, and nobody gives that state any more."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm, AsyncExitStack() as stack:
            await founded(swarm, 3)
            endorsement = await endorsed(swarm)
            await asyncio.sleep(6.0)
            asked = list[str]()
            await forgers(swarm, stack, NUM_KEYS, asked, endorsement, liar=identity_of("m0"))
            newcomer = await swarm.join("newcomer")
            assert_equal_steps(await swarm.finish(), NUM_STEPS)
            assert newcomer.peer_id in asked
            assert not any("it was committed" in event.reason for event in newcomer.of(RoundAborted))

    virtual_time.run(main(), compute_s=interval_cost)


def certified(voters: Sequence[Identity], roster: Sequence[str] = ()) -> Proof:
    """Return the proof of the state of ENDORSEMENT that `forged` makes of the same arguments."""
    data = forged(voters, "run", ENDORSEMENT.outer_step, ENDORSEMENT.state_digest, roster)
    return SIGNERS.check_certificate(data, NOW)


def test_strangers_that_certify_the_endorsed_state_of_its_step_are_not_followed() -> None:
    members, strangers = ([Identity(f"{who}{number}".encode().ljust(32)) for number in range(3)] for who in "ms")
    roster = tuple(sorted(each.peer_id for each in members))
    anchor, no_reader = Anchor.at(replace(ENDORSEMENT, roster=roster)), cast(ProofReader, None)

    def links(proof: Proof) -> tuple[Proof, ...] | None:
        return asyncio.run(links_from(no_reader, strangers[0].peer_id, proof, anchor))

    assert links(certified(members)) == ()
    assert links(certified(strangers)) is None
    for voters in (strangers, [*strangers, members[0]]):
        assert certified(voters, roster).roster == roster
        assert links(certified(voters, roster)) is None, "a third of the members is no proof"
    assert links(certified([*strangers, *members[:2]], roster)) == ()


def test_state_is_not_endorsed_when_those_that_voted_for_it_have_left() -> None:
    """Newcomers could not tell it from one that strangers certified."""
    voters, others = ([Identity(f"{who}{number}".encode().ljust(32)) for number in range(3)] for who in "ms")
    run = signed(config(min_group=2, outer_steps=NUM_STEPS))
    found = RunSurvey(
        proof=certified(voters, tuple(sorted(each.peer_id for each in others))),
        holders=(),
        absent=(),
        answered=(),
        sequence=0,
    )
    with pytest.raises(ConfigError, match="have left with it"):
        sign_survey(run, found, AUTHOR, network_id="test", now=NOW)
    assert sign_survey(run, replace(found, proof=certified(voters)), AUTHOR, network_id="test", now=NOW)


@pytest.mark.parametrize("num_left", [4, 5])
def test_state_is_endorsed_when_each_certificate_of_it_has_votes_of_more_than_a_third_of_its_roster(
    num_left: int,
) -> None:
    """Nine members decide, and six votes are enough. One member shows all nine votes, and others may show those of all
    that left and of one that stayed."""
    voters = [Identity(f"m{number}".encode().ljust(32)) for number in range(9)]
    run = signed(config(min_group=2, outer_steps=NUM_STEPS))
    proof = certified(voters, tuple(sorted(each.peer_id for each in voters[num_left:])))
    assert proof.is_known_to_roster
    found = RunSurvey(proof=proof, holders=(), absent=(), answered=(), sequence=0)
    with pytest.raises(ConfigError, match="have left with it") if num_left == 5 else nullcontext():
        sign_survey(run, found, AUTHOR, network_id="test", now=NOW)


def test_observer_that_believed_fresh_keys_follows_the_endorsed_history() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=60)) as swarm, AsyncExitStack() as stack:
            await founded(swarm, 3)
            await forgers(swarm, stack, NUM_KEYS, [])
            network = swarm.internet.network(ONLOOKER)
            stack.push_async_callback(network.close)
            membership = await stack.enter_async_context(Membership(network))
            await asyncio.sleep(1.0)
            observer = Observer(network, membership, swarm.run)
            await observer.look(await observer.members())
            assert observer.outer_step == NUM_STEPS, "without an endorsement the observer believes the many fresh keys"
            author = swarm.internet.network(Identity(b"author".ljust(32)))
            honest = [member.peer_id for member in swarm.members.values()]
            data = sign_survey(
                swarm.run, await survey(author, swarm.run, honest), AUTHOR, network_id="test", now=author.now()
            )
            assert set((await deliver(author, Methods(swarm.run.run_id).endorse, data, honest)).values()) == {""}
            await author.close()
            await asyncio.sleep(6.0)
            (step,) = await observer.look(await observer.members())
            assert set(step.group) <= set(honest)

    virtual_time.run(main(), compute_s=interval_cost)


def test_endorsement_reaches_all_members_and_changes_no_history(tmp_path: Path) -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            await founded(swarm, 3)
            data = await endorsed(swarm)
            network = swarm.internet.network(ONLOOKER)
            found = await look(swarm, network)
            first = found.endorsement
            assert first is not None
            # an older endorsement takes no member back, and one that contradicts a member's history is refused
            signatures = RunSignatures.of_run(swarm.run, AUTHOR, "test")
            other = replace(first, sequence=first.sequence + 1, state_digest=b"o" * 32)
            target = swarm.members["m0"].peer_id
            method = Methods(swarm.run.run_id).endorse
            answers = await deliver(network, method, signatures.sign(other, network.now()), [target])
            assert "has another state of outer step" in answers[target]
            older = replace(first, sequence=first.sequence - 1)
            answers = await deliver(network, method, signatures.sign(older, network.now()), [target])
            assert "a later endorsement" in answers[target]
            assert found.proof.outer_step >= first.outer_step
            now = network.now()
            await network.close()
            members = await swarm.finish()
            assert_equal_steps(members, NUM_STEPS)
            for member in members:
                (event,) = member.of(StateEndorsed)
                assert (event.step, event.digest, event.is_other) == (
                    first.outer_step,
                    first.state_digest.hex(),
                    False,
                )
            assert Endorsements(tmp_path / "votes").take(data, signatures, now)
            recalled = Endorsements(tmp_path / "votes")
            recalled.recall(signatures, now)
            assert recalled.newest == first

    virtual_time.run(main(), compute_s=interval_cost)


def test_newcomer_waits_and_begins_no_run_when_nobody_shows_the_endorsed_history() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=1, outer_steps=NUM_STEPS)) as swarm, AsyncExitStack() as stack:
            signatures = RunSignatures.of_run(swarm.run, AUTHOR, "test")
            lost = replace(ENDORSEMENT, run=swarm.run.run_id)
            data = signatures.sign(lost, swarm.internet.network(ONLOOKER).now())
            network = swarm.internet.network(Identity(b"holder".ljust(32)))
            stack.push_async_callback(network.close)
            standing = Standing(outer_step=0, state_digest=bytes(32), endorsement=data).to_bytes()

            async def answer(_peer: str, _request: bytes) -> bytes:
                return standing

            await network.serve(Methods(swarm.run.run_id).standing, answer)
            membership = await stack.enter_async_context(Membership(network))
            membership.announce(
                TrainerRecord(run=swarm.run.run_id, outer_step=0, digest=bytes(32), state="training", endorsed_step=3)
            )
            await asyncio.sleep(1.0)
            newcomer = await swarm.join("newcomer")
            await asyncio.sleep(30.0)
            assert not newcomer.of(OuterStep)
            assert "which the run's author endorses" in newcomer.of(RoundAborted)[0].reason
            newcomer.trainer.stop()

    virtual_time.run(main(), compute_s=interval_cost)


def test_endorsement_of_another_key_run_or_network_is_refused() -> None:
    data = SIGNERS.sign(ENDORSEMENT, NOW)
    assert read_endorsement(data, SIGNERS, NOW) == ENDORSEMENT
    for reader in (
        replace(SIGNERS, author=ONLOOKER.peer_id),
        replace(SIGNERS, run="other"),
        replace(SIGNERS, network_id="other"),
        replace(SIGNERS, last_step=2),
        replace(SIGNERS, admission=(AUTHOR.peer_id,)),
    ):
        with pytest.raises((PeerViolation, IntegrityError)):
            read_endorsement(data, reader, NOW)
        with pytest.raises((PeerViolation, IntegrityError)):
            Endorsements().take(data, reader, NOW)
    with pytest.raises((PeerViolation, IntegrityError)):
        Endorsements().take(data[:-1] + bytes([data[-1] ^ 1]), SIGNERS, NOW)


def test_expired_endorsement_is_not_shown() -> None:
    known = Endorsements()
    assert known.take(SIGNERS.sign(ENDORSEMENT, NOW), SIGNERS, NOW)
    assert known.shown(NOW)
    assert not known.shown(NOW + 2 * 366 * 86400)
