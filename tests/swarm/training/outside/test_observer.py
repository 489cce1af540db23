"""Tests that an observer reports every committed step once, with its proof, and no step that does not follow from the
history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest.mock import AsyncMock

import pytest
from support.training_swarm import Member, Swarm, SyntheticInner, certified, config
from swarm.network.interface import Network, Stream
from swarm.network.membership import Membership
from swarm.testing import virtual_time
from swarm.training.member.members_watch import let_others_finish
from swarm.training.member.round_service import MAX_WATCHERS, WATCHED_S
from swarm.training.outside.observer import CommittedStep, Observer
from swarm.training.round.quorum import Succession
from swarm.training.run.methods import Methods
from swarm.training.state.ancestry import LATE_S
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm.training.state.proof_reader import HISTORY_TIMEOUT_S
from swarm.training.trainer_events import Admitted, OtherHistory, OuterStep
from swarm_protocol.errors import PeerViolation, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.member_messages import Standing, StandingRequest
from swarm_protocol.records import TrainerRecord

WATCHER = Identity(b"w" * 32)


@asynccontextmanager
async def observing(swarm: Swarm) -> AsyncIterator[Observer]:
    network = swarm.internet.network(WATCHER)
    async with Membership(network) as membership:
        yield Observer(network, membership, swarm.run)
    await network.close()


async def watch(observer: Observer, last: int, pause_s: float) -> list[CommittedStep]:
    seen: list[CommittedStep] = []
    async with asyncio.timeout(600):
        while observer.outer_step < last:
            members = await observer.members()
            seen += await observer.look(members)
            assert await observer.look_for_other_history(members) is None
            await asyncio.sleep(pause_s)
    return seen


async def found(observer: Observer) -> Mapping[str, TrainerRecord]:
    async with asyncio.timeout(60):
        while not (members := await observer.members()):
            await asyncio.sleep(0.1)
    return members


@pytest.mark.parametrize("pause_s", [0.05, 3.0], ids=["often", "seldom"])
def test_observer_reports_every_committed_step_once(pause_s: float) -> None:
    async def main() -> tuple[list[CommittedStep], list[OuterStep]]:
        async with Swarm(config(outer_steps=8, min_group=2)) as swarm:
            first = await swarm.join("a")
            await swarm.join("b")
            async with observing(swarm) as observer:
                watching = asyncio.create_task(watch(observer, 8, pause_s))
                await swarm.finish()
                return await watching, first.of(OuterStep)

    seen, committed = virtual_time.run(main())
    truth = {event.step: event for event in committed}
    assert seen[-1].outer_step == 8
    for step in seen:
        event = truth[step.outer_step]
        assert (step.digest, step.group, step.num_tokens) == (event.digest, event.group, event.num_tokens)
        assert step.loss == pytest.approx(event.loss)
    numbers = [step.outer_step for step in seen]
    # after the first step that it sees it misses none: members' histories have them
    assert numbers == list(range(numbers[0], 9))


def test_observer_names_the_members_of_the_history_that_it_does_not_follow() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=1000)) as swarm:
            members = [await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=0.1)) for index in range(5)]
            few, most = members[:2], members[2:]
            swarm.internet.partition([[member.peer_id for member in few]])
            while not all(member.of(OuterStep) for member in members):
                await asyncio.sleep(0.05)
            swarm.internet.heal()
            async with observing(swarm) as observer, asyncio.timeout(120.0):
                other: OtherHistory | None = None
                while other is None or len(other.peers) < len(few):
                    await asyncio.sleep(1.0)
                    seen = await observer.members()
                    await observer.look(seen)
                    other = await observer.look_for_other_history(seen)
            follows, others = (few, most) if few[0].peer_id in observer.roster else (most, few)
            assert set(observer.roster) == {member.peer_id for member in follows}
            assert set(other.peers) <= {member.peer_id for member in others}

    virtual_time.run(main())


def test_observer_knows_the_state_after_a_round_that_only_admitted_members() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=1000)) as swarm, observing(swarm) as observer:
            members = [await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=0.1)) for index in range(3)]
            while not all(member.of(OuterStep) for member in members):
                await asyncio.sleep(0.05)
            for member in members:
                member.inner.diverges = True
            num_admitted = len(members[0].of(Admitted))
            while len(members[0].of(Admitted)) < num_admitted + 3:
                await asyncio.sleep(0.05)
            committed, after = members[0].of(OuterStep)[-1], members[0].trainer.state
            await observer.look(await found(observer))
            assert after is not None
            assert (observer.outer_step, observer.digests) == (committed.step, {after.digest.hex()})
            assert after.digest.hex() != committed.digest

    virtual_time.run(main())


def test_finished_members_stay_until_an_observer_was_shown_the_last_step() -> None:
    """Members of short steps left before the next look of an observer, which never saw the end."""

    async def main() -> tuple[int, float]:
        async with Swarm(config(outer_steps=8, min_group=2)) as swarm, observing(swarm) as observer:
            await swarm.join("a")
            await swarm.join("b")
            watching = asyncio.create_task(watch(observer, 8, 2.0))
            members = await swarm.finish()
            finished_s = asyncio.get_running_loop().time()

            async def leave(member: Member) -> None:
                others = AsyncMock(trainers=AsyncMock(return_value={}))  # none of them is behind
                run, trainer = swarm.run.run_id, member.trainer
                await let_others_finish(others, run, member.peer_id, is_watched=lambda: trainer.is_watched)
                swarm.kill(member.name)

            await asyncio.gather(*map(leave, members))
            took_s = asyncio.get_running_loop().time() - finished_s
            await watching
            return observer.outer_step, took_s

    seen, took_s = virtual_time.run(main())
    assert (seen, took_s) == (8, pytest.approx(2, abs=1.5))


def test_member_waits_for_an_observer_only_shortly_after_its_last_look() -> None:
    async def main() -> list[bool]:
        async with Swarm(config(outer_steps=2, min_group=2)) as swarm, observing(swarm) as observer:
            member = await swarm.join("a")
            await swarm.join("b")
            await watch(observer, 1, 0.1)
            await swarm.finish()
            watched = member.trainer.is_watched
            await asyncio.sleep(WATCHED_S)
            return [watched, member.trainer.is_watched]

    assert virtual_time.run(main()) == [True, False]


def test_member_stays_for_each_peer_that_watches_and_keeps_a_bounded_number_of_them() -> None:
    async def main() -> tuple[list[bool], int]:
        async with Swarm(config(outer_steps=2, min_group=2)) as swarm:
            member = await swarm.join("a")
            request = StandingRequest(run=swarm.run.run_id, step=1, watches=True).to_bytes()
            names = (Identity(bytes([n]) * 32) for n in range(MAX_WATCHERS + 2))
            watchers = [swarm.internet.network(name) for name in names]

            async def ask(watcher: Network) -> bool:
                await watcher.call(member.peer_id, Methods(swarm.run.run_id).standing, request, timeout_s=5)
                return member.trainer.is_watched

            await swarm.join("b")
            await asyncio.sleep(0.1)
            for watcher in watchers[-2:]:
                await ask(watcher)
            await swarm.finish()
            seen = [member.trainer.is_watched, *[await ask(watcher) for watcher in watchers[-2:]]]
            for watcher in watchers:
                await ask(watcher)
                await watcher.close()
            assert member.trainer._steps is not None
            return seen, len(member.trainer._steps.service._shown)

    assert virtual_time.run(main()) == ([True, True, False], MAX_WATCHERS)


def test_observer_never_counts_as_a_member() -> None:
    """The peers that members have met decide who coordinates a run's first round."""

    async def main() -> tuple[str, ...]:
        async with Swarm(config(min_group=2)) as swarm:
            await swarm.join("a")
            network = swarm.internet.network(WATCHER)
            async with Membership(network) as membership:
                observer = Observer(network, membership, swarm.run)
                await asyncio.sleep(60)  # until the member looks for a group
                members = await found(observer)
                await observer.look(members)
                request = StandingRequest(run=swarm.run.run_id, step=1, watches=True).to_bytes()
                standing = Methods(swarm.run.run_id).standing
                answer = await network.call(next(iter(members)), standing, request, timeout_s=5)
            await network.close()
            return Standing.from_bytes(answer).known

    assert WATCHER.peer_id not in virtual_time.run(main())


def test_observer_reports_nothing_for_a_run_without_members() -> None:
    async def main() -> None:
        async with Swarm(config()) as swarm:
            await swarm.join("a")
            await swarm.finish()
            other = replace(swarm.run, issued_at=swarm.run.issued_at + 1)
            network = swarm.internet.network(WATCHER)
            async with Membership(network) as membership:
                observer = Observer(network, membership, other)
                assert await observer.members() == {}
                assert await observer.look({}) == []
            await network.close()

    virtual_time.run(main())


def test_observer_refuses_a_certificate_that_the_run_does_not_allow() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=1)) as swarm:
            await swarm.join("a")
            await swarm.finish()
            async with observing(swarm) as observer:
                members = await found(observer)
                # as if all members had signed a step that their run forbids
                signatures = replace(observer._reader.signatures, succession=Succession(min_group=2))
                observer._reader = replace(observer._reader, signatures=signatures)
                with pytest.raises(PeerViolation, match="does not allow"):
                    await observer.look(members)
                assert observer.outer_step == 0

    virtual_time.run(main())


@pytest.mark.parametrize("certificate", [b"nonsense", b""], ids=["nonsense", "nothing"])
def test_observer_follows_an_honest_member_beside_a_liar(certificate: bytes) -> None:
    async def main() -> list[int]:
        async with Swarm(config(outer_steps=3)) as swarm:
            await swarm.join("a")
            await swarm.finish()
            liar = swarm.internet.network(Identity(b"l" * 32))

            async def lie(_peer: str, _request: bytes) -> bytes:
                return Standing(outer_step=99, state_digest=bytes(32), certificate=certificate).to_bytes()

            await liar.serve(Methods(swarm.run.run_id).standing, lie)
            async with observing(swarm) as observer:
                record = TrainerRecord(run=swarm.run.run_id, outer_step=99, digest=bytes(32), state="training")
                members = {**await found(observer), liar.peer_id: record}
                steps = await observer.look(members)
                if certificate:
                    with pytest.raises(SwarmError):
                        await observer.look({liar.peer_id: record})
            await liar.close()
            return [step.outer_step for step in steps]

    assert virtual_time.run(main()) == [3]


def test_observer_reports_later_steps_when_many_silent_peers_claim_to_be_further() -> None:
    async def main() -> list[int]:
        async with Swarm(config(outer_steps=8, min_group=2)) as swarm:
            await swarm.join("a")
            await swarm.join("b")
            liars = [Identity(bytes([number + 100]) * 32).peer_id for number in range(30)]
            claim = TrainerRecord(run=swarm.run.run_id, outer_step=10**6, digest=bytes(32), state="training")
            async with observing(swarm) as observer:
                while not observer.outer_step:
                    await observer.look(await observer.members())
                    await asyncio.sleep(0.1)
                await swarm.finish()
                steps = await observer.look(dict.fromkeys(liars, claim) | dict(await found(observer)))
            return [step.outer_step for step in steps]

    assert virtual_time.run(main())[-1:] == [8]


def test_observer_of_a_closed_run_refuses_a_certificate_with_a_stranger() -> None:
    """An admitted peer has signed it together with a stranger, and shows it."""
    liar, stranger = Identity(b"l" * 32), Identity(b"s" * 32)

    async def main(admission: tuple[str, ...]) -> list[int]:
        async with Swarm(config(outer_steps=3, min_group=2, admission=admission)) as swarm:
            network = swarm.internet.network(liar)
            run = swarm.run.run_id
            signers = [RunSignatures(identity=each, network_id="test", run=run) for each in (liar, stranger)]
            forged = certified(signers, 3, network.now())

            async def lie(_peer: str, _request: bytes) -> bytes:
                return Standing(outer_step=3, state_digest=bytes(32), certificate=forged).to_bytes()

            await network.serve(Methods(run).standing, lie)
            record = TrainerRecord(run=run, outer_step=3, digest=bytes(32), state="training")
            async with observing(swarm) as observer:
                try:
                    return [step.outer_step for step in await observer.look({liar.peer_id: record})]
                finally:
                    await network.close()

    assert virtual_time.run(main(())) == [3], "in an open run there is no other certificate to compare it with"
    with pytest.raises(PeerViolation, match="does not admit"):
        virtual_time.run(main(tuple(sorted((liar.peer_id, WATCHER.peer_id)))))


def test_observer_of_a_closed_run_lists_no_strangers() -> None:
    async def main() -> None:
        async with Swarm(config()) as swarm:
            member = await swarm.join("a")
            async with observing(swarm) as observer:
                assert set(await found(observer)) == {member.peer_id}
                signatures = replace(observer._reader.signatures, admission=(WATCHER.peer_id,))
                observer._reader = replace(observer._reader, signatures=signatures)
                assert await observer.members() == {}
            await swarm.finish()

    virtual_time.run(main())


@pytest.mark.parametrize(("num_there", "longest_s"), [(2, 1.0), (1, HISTORY_TIMEOUT_S + 3 * LATE_S + 1.0)])
def test_strangers_whose_histories_trickle_hardly_delay_a_look(num_there: int, longest_s: float) -> None:
    """With one member of two, which is too few for a next step, any stranger may be the one that knows of it."""

    async def main() -> tuple[list[CommittedStep], int, float]:
        async with Swarm(config(outer_steps=2, min_group=2)) as swarm, observing(swarm) as observer:
            members = [await swarm.join(name) for name in "ab"]
            await watch(observer, 2, 0.1)
            strangers = [Identity(bytes([number + 100]) * 32) for number in range(5)]
            signers = [RunSignatures.of_run(swarm.run, each, "test") for each in strangers]
            networks = [swarm.internet.network(each) for each in strangers]
            forged, tricklers = certified(signers, 2, networks[0].now()), set[Network]()

            async def show(_peer: str, _request: bytes) -> bytes:
                return Standing(outer_step=2, state_digest=bytes(32), certificate=forged).to_bytes()

            for network in networks:

                async def trickle(_peer: str, stream: Stream, network: Network = network) -> None:
                    tricklers.add(network)
                    while True:
                        await stream.send(forged)
                        await asyncio.sleep(1)

                methods = Methods(swarm.run.run_id)
                await network.serve(methods.standing, show)
                await network.serve_stream(methods.history, trickle)
            there = [*(member.peer_id for member in members[:num_there]), *(each.peer_id for each in strangers)]
            claim = TrainerRecord(run=swarm.run.run_id, outer_step=91, digest=bytes(32), state="training")
            began_s = asyncio.get_running_loop().time()
            steps = await observer.look(dict.fromkeys(there, claim))
            took_s = asyncio.get_running_loop().time() - began_s
            for network in networks:
                await network.close()
            return steps, len(tricklers), took_s

    steps, num_tricklers, took_s = virtual_time.run(main())
    assert (steps, num_tricklers) == ([], 0 if num_there == 2 else 5)
    assert took_s < longest_s


def test_look_waits_for_members_with_slow_lines_when_strangers_have_nothing_new() -> None:
    async def main() -> list[int]:
        async with Swarm(config(outer_steps=8, min_group=2)) as swarm, observing(swarm) as observer:
            members = [await swarm.join(name) for name in "ab"]
            await watch(observer, 1, 0.1)
            await swarm.finish()
            links = observer._links

            async def slowly(peer: str) -> list[Proof]:
                if peer not in {member.peer_id for member in members}:
                    return []
                await asyncio.sleep(HISTORY_TIMEOUT_S - 1)
                return await links(peer)

            observer._links = slowly  # type: ignore[method-assign]
            strangers = [Identity(bytes([number + 100]) * 32).peer_id for number in range(5)]
            claim = TrainerRecord(run=swarm.run.run_id, outer_step=91, digest=bytes(32), state="training")
            steps = await observer.look(dict.fromkeys(strangers, claim) | dict(await found(observer)))
            return [step.outer_step for step in steps]

    assert virtual_time.run(main())[-1:] == [8]
