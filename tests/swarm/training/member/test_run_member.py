"""Tests whole runs on a simulated internet: replicas stay bit-identical while members join, lag, leave and return."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.faults import Fault, FaultScript
from support.leaks import no_leaks
from support.training_swarm import (
    NUM_VALUES,
    AlteredMember,
    Swarm,
    SyntheticInner,
    assert_equal_steps,
    config,
    identity_of,
    interval_cost,
    setup_of,
    signed,
)
from swarm.network.membership import Membership
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.testing import virtual_time
from swarm.training.data.corpus import Corpus
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.interval import TrainingSetup
from swarm.training.member.members_watch import LIST_S, MAX_LIST_S, MAX_WATCH_S, NUM_WATCHED, WATCH_S, list_s, watch_s
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember, RunMemberOptions
from swarm.training.round import group_formation
from swarm.training.round.group_formation import MAX_GRACE_S
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.state import run_context
from swarm.training.state.certificate_history import Proof
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import (
    Admitted,
    HeldOutMeasured,
    IntervalDone,
    IntervalFailed,
    OuterStep,
    RoundAborted,
    StateFetched,
    TrainingEvent,
)
from swarm_compression import warm_up
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import ConfigError, IntegrityError, RoundError
from swarm_protocol.identity import Identity
from torch import Tensor

pytestmark = pytest.mark.usefixtures("only_errors_logged")

COST = partial(interval_cost, other_s=0.001)


@pytest.mark.parametrize("num_members", [1, 2, 3, 6])
def test_run_commits_equal_states_and_lowers_the_loss(num_members: int) -> None:
    async def main() -> None:
        with no_leaks():
            async with Swarm(config(min_group=num_members)) as swarm:
                for index in range(num_members):
                    await swarm.join(f"m{index}")
                members = await swarm.finish()
                assert_equal_steps(members, 3)
                for member in members:
                    assert [event.step for event in member.of(OuterStep)] == [1, 2, 3]
                    assert not member.of(RoundAborted)
                    assert len(member.of(Admitted)[0].group) == num_members
                    first, last = member.of(HeldOutMeasured)
                    assert (first.step, last.step) == (0, 3)
                    assert last.loss < first.loss / 2
                losses = [{event.loss for event in member.of(OuterStep)} for member in members]
                assert all(each == losses[0] for each in losses)

    virtual_time.run(main())


@pytest.mark.parametrize("streaming", [{}, {"fragments": 2, "overlap_steps": 2}], ids=["diloco", "streaming"])
def test_run_measures_held_out_loss_at_every_validation_interval_and_in_records(streaming: dict[str, object]) -> None:
    measured: list[dict[int, float]] = []

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=7, validation_interval=3, **streaming)) as swarm:
            for name in ("a", "b"):
                await swarm.join(name)
            visitor = swarm.internet.network()
            async with Membership(visitor) as membership:
                members = await swarm.finish()
                await asyncio.sleep(2)
                records = await membership.trainers(swarm.run.run_id)
            await visitor.close()
            measured.extend({event.step: event.loss for event in member.of(HeldOutMeasured)} for member in members)
            newest = {
                (each.validation.outer_step, each.validation.loss) for each in records.values() if each.validation
            }
            assert newest == {(7, measured[0][7])}

    virtual_time.run(main())
    assert sorted(measured[0]) == [0, 3, 6, 7]
    assert measured[0] == measured[1], "members measured one state on the same held-out data and differ"
    assert [measured[0][step] for step in (0, 3, 6, 7)] == sorted(measured[0].values(), reverse=True)


def test_run_continues_when_held_out_loss_cannot_be_measured() -> None:
    class Failing(SyntheticInner):
        def held_out_loss(self, theta_N: Tensor, num_windows: int = 1, draw: int = 0) -> float:
            if theta_N.any():
                raise RoundError("no memory left")
            return 1.0

    async def main() -> None:
        async with Swarm(config(outer_steps=3, validation_interval=1)) as swarm:
            member = await swarm.join("a", inner=Failing())
            await swarm.finish()
            assert [event.step for event in member.of(OuterStep)] == [1, 2, 3]

    virtual_time.run(main())


def test_members_check_their_own_certificates_ahead_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    check, own = RunContext.check, list[bytes]()

    async def noted(context: RunContext, certificate: bytes, *, is_own: bool = False) -> Proof:
        own.extend([certificate] * is_own)
        return await check(context, certificate, is_own=is_own)

    monkeypatch.setattr(RunContext, "check", noted)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=3)) as swarm:
            for name in ("a", "b"):
                await swarm.join(name)
            await swarm.finish()
        assert len(own) >= 2 * 3, "each member checks one certificate of its own for each step"

    virtual_time.run(main())


def test_run_uses_each_sample_exactly_once() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=3, outer_steps=4)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}")
            members = await swarm.finish()
            used = sorted(sample for member in members for batch in member.inner.trained for sample in batch)
            assert used == list(range(3 * 4 * 10))
            state = members[0].trainer.state
            assert state is not None
            assert state.manifest.num_committed == len(used)

    virtual_time.run(main())


def test_run_reports_the_bytes_that_it_sent() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=4)) as swarm:
            members = [await swarm.join(f"m{index}", inner=SyntheticInner(num_values=400_000)) for index in range(4)]
            await swarm.finish()
            for events in zip(*(member.of(OuterStep) for member in members), strict=True):
                # digests of leaves and audits take some 60 KB, however large the vector; parts may be of unequal sizes
                assert 1.75 < sum(event.bytes_sent for event in events) / len(members) / 400_000 < 1.95

    virtual_time.run(main(), compute_s=lambda _: 0.01)


def test_member_that_joins_a_running_run_fetches_the_state_from_several_donors_and_takes_part() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=7)) as swarm:
            for index in range(3):
                # 2.4 MB of state in three chunks, so that three donors can share
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=300_000))
            while swarm.members["m0"].trainer.state is None or swarm.members["m0"].trainer.state.outer_step < 2:
                await asyncio.sleep(0.05)
            late = await swarm.join("late", inner=SyntheticInner(num_values=300_000))
            members = await swarm.finish()
            assert_equal_steps(members, 7)
            fetched = late.of(StateFetched)[0]
            assert fetched.step >= 2
            assert len(fetched.donors) == 3
            assert fetched.num_bytes == 2_400_000
            entered = late.of(IntervalDone)[0]
            # one round admits it, and it trains in the next interval
            assert entered.step <= fetched.step + 3
            assert late.peer_id in late.of(OuterStep)[-1].group

    virtual_time.run(main(), compute_s=COST)


def test_member_that_joins_after_the_end_fetches_the_final_state_and_returns() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2)) as swarm:
            for index in range(2):
                await swarm.join(f"m{index}")
            await swarm.finish()
            late = await swarm.join("late")
            members = await swarm.finish("late", "m0")
            assert not late.trainer.alone
            assert_equal_steps(members, 3)
            assert [event.step for event in late.of(StateFetched)] == [3]
            assert not late.of(OuterStep)

    virtual_time.run(main())


def test_run_below_min_group_reports_how_many_are_missing_and_waits() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2)) as swarm:
            alone = await swarm.join("m0")
            await asyncio.sleep(40)
            aborted = alone.of(RoundAborted)
            assert 2 <= len(aborted) <= 5
            assert alone.trainer.alone.endswith("so this one begins the run from its initial state")
            assert "1 of the 2 members that a step needs is ready" in aborted[0].reason
            await swarm.join("m1")
            assert_equal_steps(await swarm.finish(), 3)

    virtual_time.run(main())


def test_run_waits_for_a_straggler_for_the_grace_only_and_counts_its_partial_work() -> None:
    slow_step_s = 0.4
    warm_up()  # otherwise the first round waits for a compiler

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=2, interval_steps=50)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}", inner=SyntheticInner())
            slow = await swarm.join("slow", inner=SyntheticInner(step_s=slow_step_s))
            members = await swarm.finish()
            assert_equal_steps(members, 2)
            quick = swarm.members["m0"]
            # its whole lease would take it 20 s
            assert all(event.seconds < 5.0 for event in quick.of(OuterStep))
            # when asked to hurry, it brought part of its lease instead of nothing
            assert any(0 < event.num_steps < 50 for event in slow.of(IntervalDone))
            assert slow.peer_id in quick.of(OuterStep)[-1].group

    # the slow member's steps take real time, so this test runs in real time: about 2 s
    asyncio.run(main())


def test_interval_bounded_in_time_contributes_the_steps_that_fit() -> None:
    async def main() -> None:
        internet = MemoryInternet()
        run = signed(config(min_group=1, outer_steps=1, interval_steps=1000, interval_s=0.2))
        identity = Identity(b"t" * 32)
        events: list[TrainingEvent] = []
        network = internet.network(identity)
        inner = SyntheticInner(virtual_step_s=0.01)
        setup = TrainingSetup(inner=inner, theta_N=torch.zeros(NUM_VALUES))
        options = RunMemberOptions(clock=inner.clock, setup=setup)
        async with Membership(network) as membership:
            trainer = RunMember(network, membership, identity, run, on_event=events.append, options=options)
            async with trainer:
                await trainer.run()
        await network.close()
        done = next(event for event in events if isinstance(event, IntervalDone))
        assert done.num_steps in {20, 21}

    virtual_time.run(main())


def test_run_continues_without_a_member_whose_training_diverges() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=3)) as swarm:
            await swarm.join("m0")
            await swarm.join("m1")
            sick = await swarm.join("sick", inner=SyntheticInner(corrupt=lambda x_N: x_N * float("nan")))
            members = await swarm.finish()
            assert_equal_steps(members, 3)
            assert len(sick.of(IntervalFailed)) == 3
            assert all(event.num_tokens == 80 for event in members[0].of(OuterStep))
            assert not members[0].of(RoundAborted)

    virtual_time.run(main())


def test_run_takes_few_rounds_while_training_diverges_everywhere_and_continues_when_one_member_recovers() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=2)) as swarm:
            members = [await swarm.join(f"m{index}", inner=SyntheticInner(diverges=True)) for index in range(3)]
            await asyncio.sleep(60)
            for member in members:
                assert 5 < len(member.of(Admitted)) < 25
                assert member.trainer.state is not None
                assert member.trainer.state.outer_step == 0
            members[0].inner.diverges = False
            assert_equal_steps(await swarm.finish(timeout_s=60), 2)

    virtual_time.run(main())


@pytest.mark.parametrize(("hung", "has_trained"), [(0, True), (1, True), (2, True), (0, False)])
def test_run_continues_without_a_member_that_hangs_while_the_others_bring_no_work(
    hung: int, has_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of the three may hang, also the coordinator of the first attempt."""
    monkeypatch.setattr(group_formation, "MIN_WORK_DUE_S", 100.0)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=100)) as swarm:
            members = [await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=1.0)) for index in range(3)]
            while has_trained and not all(member.of(OuterStep) for member in members):
                await asyncio.sleep(0.1)
            members[hung].inner.virtual_step_s = 1e7
            others = members[:hung] + members[hung + 1 :]
            for other in others:
                other.inner.diverges = True
            while not all(other.of(IntervalFailed) for other in others):
                await asyncio.sleep(0.1)
            for other in others:
                other.inner.diverges = False
            num_steps = len(others[0].of(OuterStep))
            async with asyncio.timeout(600.0):
                while len(others[0].of(OuterStep)) < num_steps + 3:
                    await asyncio.sleep(0.5)

    virtual_time.run(main())


def test_work_of_a_slow_member_counts_while_faster_ones_never_bring_any() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=100)) as swarm:
            members = [await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=1.0)) for index in range(3)]
            while not all(member.of(OuterStep) for member in members):
                await asyncio.sleep(0.1)
            *broken, slow = members
            slow.inner.virtual_step_s = 5.0
            for member in broken:
                member.inner.diverges = True
            num_steps = len(slow.of(OuterStep))
            async with asyncio.timeout(150.0):
                while len(slow.of(OuterStep)) < num_steps + 4:
                    await asyncio.sleep(0.5)
            assert all(member.of(IntervalFailed) for member in broken)

    virtual_time.run(main())


@pytest.mark.parametrize("gone", range(3))
def test_member_that_left_in_the_middle_of_a_step_is_no_coordinator_that_puts_others_off(gone: int) -> None:
    """It still serves its state until it is closed. One of the three is the coordinator of the next attempt."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=100)) as swarm:
            members = [await swarm.join(f"m{index}") for index in range(3)]
            while not all(member.of(OuterStep) for member in members):
                await asyncio.sleep(0.1)
            swarm.internet.partition([[member.peer_id] for member in members])
            await asyncio.sleep(45.0)
            members[gone].trainer.stop()
            await swarm.finish(f"m{gone}")
            swarm.internet.heal()
            (other, _) = members[:gone] + members[gone + 1 :]
            num_steps = len(other.of(OuterStep))
            async with asyncio.timeout(20.0):
                while len(other.of(OuterStep)) < num_steps + 2:
                    await asyncio.sleep(0.1)

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize("slow", ["m0", "m1", "m2"])
def test_member_that_gets_its_state_for_minutes_holds_up_the_others_for_seconds(slow: str) -> None:
    """It put the others off as their coordinator for as long as an interval takes and a minute more. One of the three
    is the coordinator of the next attempt."""
    script = FaultScript([Fault(who=slow, phase="round.applied", what="delay", nth=2, delay_s=300.0)])

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=8), script) as swarm:
            for name in ("m0", "m1", "m2"):
                await swarm.join(name, inner=SyntheticInner(virtual_step_s=12.0))
            members = await swarm.finish(timeout_s=6000.0)
            assert_equal_steps(members, 8)
            others = [member for member in members if member.name != slow]
            assert max(event.seconds for member in others for event in member.of(OuterStep)) < 60.0 + MAX_GRACE_S + 20.0

    virtual_time.run(main())
    script.assert_all_fired()


@pytest.mark.parametrize("slow", ["m0", "m1", "m2"])
def test_member_that_makes_a_large_state_itself_is_no_coordinator_that_is_gone(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_context, "SLOWEST_VALUES_PER_S", NUM_VALUES / 30.0)
    script = FaultScript([Fault(who=slow, phase="round.applied", what="delay", nth=2, delay_s=25.0)])

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=4), script) as swarm:
            for name in ("m0", "m1", "m2"):
                await swarm.join(name, inner=SyntheticInner(virtual_step_s=3.0))
            members = await swarm.finish()
            assert_equal_steps(members, 4)
            assert not any(member.of(RoundAborted) for member in members)

    virtual_time.run(main())
    script.assert_all_fired()


def test_stopped_member_leaves_after_the_step_and_the_others_continue() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=6)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}")
            leaver = swarm.members["m2"]
            while not leaver.of(OuterStep):
                await asyncio.sleep(0.05)
            leaver.trainer.stop()
            await swarm.finish("m2")
            await leaver.trainer.close()
            await leaver.network.close()
            assert_equal_steps(await swarm.finish("m0", "m1"), 6)
            assert leaver.trainer.state is not None
            assert leaver.trainer.state.outer_step < 6

    virtual_time.run(main(), compute_s=COST)


def test_stopped_member_that_is_ready_long_before_the_others_leaves_with_their_step() -> None:
    """It left at once, since its attempts ended with too few members that were ready: its work was lost, and the others
    had one member less of their last step."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=4)) as swarm:
            quick = await swarm.join("m0", inner=SyntheticInner(virtual_step_s=4.0))
            for name in ("m1", "m2", "m3"):
                await swarm.join(name, inner=SyntheticInner(virtual_step_s=20.0))
            while not quick.of(OuterStep):
                await asyncio.sleep(0.1)
            quick.trainer.stop()
            await swarm.finish("m0")
            assert len(quick.of(IntervalDone)) == len(quick.of(OuterStep)) == 2
            assert quick.peer_id in quick.of(OuterStep)[-1].group
            await quick.trainer.close()
            await quick.network.close()
            assert_equal_steps(await swarm.finish("m1", "m2", "m3"), 4)

    virtual_time.run(main())


def test_stopped_member_leaves_at_once_when_no_step_can_end() -> None:
    """The first one is a founder whose members have not joined yet, the second one has lost the other of two
    members."""

    async def stop(swarm: Swarm, name: str) -> None:
        swarm.members[name].trainer.stop()
        await swarm.finish(name, timeout_s=1.0)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=100)) as swarm:
            founder = await swarm.join("m0")
            await asyncio.sleep(60)
            assert not founder.of(Admitted)
            await stop(swarm, "m0")
        async with Swarm(config(min_group=2, outer_steps=100)) as swarm:
            stays, leaver = await swarm.join("m0"), await swarm.join("m1")
            while not leaver.of(OuterStep):
                await asyncio.sleep(0.05)
            swarm.kill("m1")
            while not stays.of(RoundAborted):
                await asyncio.sleep(0.05)
            await stop(swarm, "m0")

    virtual_time.run(main(), compute_s=COST)


def test_member_that_ends_early_stops_the_computation_of_its_thread() -> None:
    """Otherwise it would compute another member's interval to its end, and the process that saves its state would wait
    for that."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=100)) as swarm:
            member = await swarm.join("m0")
            await asyncio.sleep(60)
            assert member.task is not None
            assert not member.trainer._intervals.is_leaving.is_set()
            member.task.cancel()
            await asyncio.wait({member.task})
            assert member.trainer._intervals.is_leaving.is_set()

    virtual_time.run(main(), compute_s=COST)


def test_run_continues_where_it_was_when_members_resume_with_a_certificate() -> None:
    async def main() -> None:
        first = Swarm(config(min_group=2, outer_steps=5))
        async with first:
            for index in range(2):
                await first.join(f"m{index}")
            while not first.members["m0"].of(OuterStep):
                await asyncio.sleep(0.05)
            state, certificate = first.members["m0"].trainer.state, first.members["m0"].trainer.certificate
        assert state is not None
        async with Swarm(config(min_group=2, outer_steps=5)) as again:
            await again.join("m0", state=state, certificate=certificate)
            newcomer = await again.join("m1")
            members = await again.finish()
            assert_equal_steps(members, 5)
            assert newcomer.of(StateFetched)[0].step == state.outer_step

    virtual_time.run(main(), compute_s=COST)


def test_member_that_was_away_returns_after_its_members_have_left_and_all_others_were_restarted() -> None:
    """It follows only certificates that its own state's members voted for, one after the other."""
    settings = config(min_group=2, outer_steps=12)

    async def main() -> None:
        async with Swarm(settings) as first:
            old = [await first.join(f"old{index}") for index in range(3)]
            while not all(member.of(OuterStep) for member in old):
                await asyncio.sleep(0.05)
            away = old[0].trainer.replica
            assert away is not None
            state, certificate = away.current, away.certificate
            new = [await first.join(f"new{index}") for index in range(3)]
            while not {member.peer_id for member in new}.issubset(away.roster):
                await asyncio.sleep(0.05)
            for member in old:
                member.trainer.stop()
            await first.finish(*(member.name for member in old))
            replicas = {member.name: member.trainer.replica for member in new}
            while any({member.peer_id for member in old}.intersection(each.proof.voters) for each in replicas.values()):
                await asyncio.sleep(0.05)
        async with Swarm(settings) as again:
            for name, each in replicas.items():
                assert each is not None
                kept = each.history.certificates
                await again.join(name, state=each.current, certificate=each.certificate, history=(b"spoiled", *kept))
            await again.join("old0", state=state, certificate=certificate)
            assert_equal_steps(await again.finish(), settings.outer_steps)

    virtual_time.run(main(), compute_s=COST)


def test_resume_is_refused_with_the_certificate_of_another_state() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=1)) as swarm:
            member = await swarm.join("m0")
            await swarm.finish()
            state, certificate = member.trainer.state, member.trainer.certificate
        assert state is not None
        async with Swarm(config(min_group=1)) as again:
            spoiled = replace(state, theta_N=state.theta_N + 1).hashed_again()
            other = await again.join("m0", state=spoiled, certificate=certificate)
            assert other.task is not None
            with pytest.raises(IntegrityError, match="another state"):
                await other.task
            other.task = None

    virtual_time.run(main())


def test_resume_continues_without_a_certificate_that_has_become_invalid() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=1, outer_steps=3)) as swarm:
            member = await swarm.join("m0")
            await swarm.finish()
            state, certificate = member.trainer.state, member.trainer.certificate
        assert state is not None
        # a certificate of another run is refused as an expired one is: it proves nothing any more, and is no forgery
        async with Swarm(config(min_group=1, outer_steps=4)) as again:
            other = await again.join("m0", state=state, certificate=certificate)
            await again.finish()
            assert [each.step for each in other.of(OuterStep)] == [4]

    virtual_time.run(main(), compute_s=COST)


def test_member_with_another_state_is_left_out_until_it_has_fetched_the_right_one() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=4)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}")
            odd = await swarm.join("odd", setup=TrainingSetup(inner=SyntheticInner(), theta_N=torch.ones(NUM_VALUES)))
            members = await swarm.finish()
            assert_equal_steps(members, 4)
            assert odd.of(StateFetched)
            assert odd.peer_id not in swarm.members["m0"].of(Admitted)[0].group

    virtual_time.run(main(), compute_s=COST)


def test_members_form_one_first_group_when_some_do_not_see_all_records() -> None:
    """On a real network a record may be found late. One member knows the others here, and names them to the rest."""

    async def main() -> None:
        async with Swarm(config(min_group=2)) as swarm:
            for index in range(4):
                member = await swarm.join(f"m{index}")
                if index != 3:

                    async def see_nothing(run: str) -> dict[str, object]:
                        return {}

                    member.trainer._membership.trainers = see_nothing  # type: ignore[method-assign, assignment]
            members = await swarm.finish()
            assert_equal_steps(members, 3)
            assert all(len(member.of(Admitted)[0].group) == 4 for member in members)

    virtual_time.run(main())


def test_partition_without_enough_members_on_one_side_heals_to_one_state() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=6)) as swarm:
            for index in range(6):
                await swarm.join(f"m{index}")
            while not swarm.members["m0"].of(OuterStep):
                await asyncio.sleep(0.05)
            cut = [swarm.members[name].peer_id for name in ("m4", "m5")]
            swarm.internet.partition([cut])
            await asyncio.sleep(8.0)
            # they are as many as the run's min_group, but fewer than two thirds of its members
            assert len(swarm.members["m4"].of(OuterStep)) < len(swarm.members["m0"].of(OuterStep))
            swarm.internet.heal()
            assert_equal_steps(await swarm.finish(), 6)

    virtual_time.run(main(), compute_s=COST)


def test_partition_into_halves_stops_the_run_until_it_heals() -> None:
    """If either half could commit alone, the run would have two states."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=4)) as swarm:
            for index in range(4):
                await swarm.join(f"m{index}")
            while not all(member.of(OuterStep) for member in swarm.members.values()):
                await asyncio.sleep(0.05)
            swarm.internet.partition([[swarm.members[name].peer_id for name in ("m0", "m1")]])
            await asyncio.sleep(40.0)
            assert all(len(member.of(OuterStep)) == 1 for member in swarm.members.values())
            for half in (("m0", "m1"), ("m2", "m3")):
                reasons = [event.reason for name in half for event in swarm.members[name].of(RoundAborted)]
                words = "2 of the 3 members of the last step that the next one needs are ready"
                assert any(words in each for each in reasons), reasons
            swarm.internet.heal()
            assert_equal_steps(await swarm.finish(), 4)

    virtual_time.run(main(), compute_s=COST)


def test_member_that_leaves_is_not_waited_for_when_a_newcomer_joins() -> None:
    """Two thirds of two members are both. A last round lets the one that stays continue with a newcomer."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=5)) as swarm:
            stays, leaver = await swarm.join("m0"), await swarm.join("m1")
            while not leaver.of(OuterStep):
                await asyncio.sleep(0.05)
            leaver.trainer.stop()
            await swarm.finish("m1")
            await leaver.trainer.close()
            await leaver.network.close()
            assert leaver.trainer.state is not None
            assert leaver.trainer.state.manifest.roster == (stays.peer_id,)
            await swarm.join("m2")
            assert_equal_steps(await swarm.finish("m0", "m2"), 5)

    virtual_time.run(main(), compute_s=COST)


def test_partition_ends_in_one_state_when_both_halves_went_on() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=1, outer_steps=12)) as swarm:
            for index in range(4):
                await swarm.join(f"m{index}")
            while not swarm.members["m0"].of(OuterStep):
                await asyncio.sleep(0.05)
            swarm.internet.partition([[swarm.members[name].peer_id for name in ("m0", "m1")]])
            await asyncio.sleep(6.0)
            assert len({member.digest for member in swarm.members.values()}) == 2, "one half did not go on"
            swarm.internet.heal()
            members = await swarm.finish()
            assert len({member.digest for member in members}) == 1
            assert any(member.of(StateFetched) for member in members)

    virtual_time.run(main(), compute_s=COST)


@pytest.mark.parametrize("num_members", [3, 6])
def test_run_over_links_with_round_trips_of_three_seconds_commits_its_steps(num_members: int) -> None:
    async def main() -> None:
        link = LinkModel(latency_s=1.5, jitter_s=0.1)
        async with Swarm(config(min_group=num_members), link=link) as swarm:
            members = [await swarm.join(f"m{index}") for index in range(num_members)]
            assert_equal_steps(await swarm.finish(), 3)
            assert not any(member.of(RoundAborted) for member in members)

    virtual_time.run(main())


def test_run_over_slow_links_with_jitter_commits_equal_states() -> None:
    async def main() -> None:
        link = LinkModel(latency_s=0.1, jitter_s=0.05, bandwidth_bytes_per_s=100_000.0)
        async with Swarm(config(min_group=3, outer_steps=2), link=link) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=200_000))
            assert_equal_steps(await swarm.finish(), 2)

    virtual_time.run(main())


def test_run_with_the_real_inner_loop_lowers_the_validation_loss(tiny_run: RunConfig, tiny_corpus: Corpus) -> None:
    async def main() -> None:
        run = replace(tiny_run, min_group=2, outer_steps=3, interval_steps=8)
        async with Swarm(run) as swarm:
            for index in range(2):
                inner = InnerLoop(run, build_model(run.model), tiny_corpus)
                await swarm.join(f"m{index}", setup=TrainingSetup(inner=inner, theta_N=initial_theta(run)))
            members = await swarm.finish()
            assert_equal_steps(members, 3)
            first, last = members[0].of(HeldOutMeasured)
            assert last.loss < first.loss

    virtual_time.run(main())


def test_close_before_run_leaves_nothing_behind() -> None:
    async def main() -> None:
        with no_leaks():
            async with Swarm(config()) as swarm:
                member = await swarm.join("m0")
                assert member.task is not None
                member.task.cancel()
                await asyncio.wait({member.task})

    virtual_time.run(main())


def test_rounds_compute_with_denormal_numbers_when_the_program_flushes_them() -> None:
    """They count in a state's digest, on which members whose programs differ in this would not agree."""

    def halved() -> float:
        return torch.full((1,), 2.0**-126).mul_(0.5).item()

    async def main() -> None:
        async with Swarm(config()) as swarm:
            member = await swarm.join("m0")
            assert member.trainer._executor.submit(halved).result() == 2.0**-127

    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    try:
        assert halved() == 0.0
        virtual_time.run(main())
    finally:
        torch.set_flush_denormal(False)


def test_member_with_damaged_data_ends_with_the_reason() -> None:
    def refuse(_theta_N: torch.Tensor) -> torch.Tensor:
        raise IntegrityError("the tokens are damaged")

    async def main() -> None:
        async with Swarm(config(min_group=2)) as swarm:
            await swarm.join("m0")
            await swarm.join("m1")
            bad = await swarm.join("bad", inner=SyntheticInner(corrupt=refuse))
            assert bad.task is not None
            with pytest.raises(IntegrityError, match="the tokens are damaged"):
                await bad.task
            bad.is_alive = False
            # it is not closed yet, but the others do not wait for it
            others = await swarm.finish()
            assert_equal_steps(others, 3)
            assert max(event.seconds for event in others[0].of(OuterStep)) < 5.0

    virtual_time.run(main())


def test_member_that_never_trained_closes_its_inner_loop() -> None:
    async def main() -> None:
        with no_leaks():
            async with Swarm(config(admission=(Identity(b"o" * 32).peer_id,))) as swarm:
                stranger = await swarm.join("m0")
                assert stranger.task is not None
                with pytest.raises(ConfigError, match="admits only the peers in its setting admission"):
                    await stranger.task
                stranger.task = None
            assert stranger.inner.is_closed

    virtual_time.run(main())


def test_last_survivor_continues_alone_when_the_run_allows_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    async def main() -> None:
        async with Swarm(config(min_group=1, outer_steps=6)) as swarm:
            for index in range(4):
                await swarm.join(f"m{index}")
            while not swarm.members["m3"].of(OuterStep):
                await asyncio.sleep(0.05)
            for name in ("m0", "m1", "m2"):
                swarm.kill(name)
            (survivor,) = await swarm.finish("m3")
            assert_equal_steps([survivor], 6)
            assert survivor.of(OuterStep)[-1].group == (survivor.peer_id,)

    virtual_time.run(main(), compute_s=COST)


class KeepsDrivers(AlteredMember):
    """Keep the drivers of its steps."""

    drivers: list[RoundDriver]

    async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
        self.drivers = [*getattr(self, "drivers", []), driver]
        return await super()._drive(driver, context)


def test_look_at_does_nothing_when_the_step_is_over() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=1)) as swarm:
            members = [await swarm.join(f"m{index}", kind=KeepsDrivers) for index in range(2)]
            await swarm.finish()
            trainer = members[0].trainer
            assert isinstance(trainer, KeepsDrivers)
            driver = trainer.drivers[0]
            num_tasks = len(asyncio.all_tasks())
            driver.queries.look_at("a peer that joins now")
            assert len(asyncio.all_tasks()) == num_tasks

    virtual_time.run(main())


def test_number_of_requests_while_members_train_does_not_grow_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_asked = {"standing": 0, "lookup": 0}
    call, lookup = MemoryNetwork.call, MemoryNetwork.lookup

    async def counted_call(self: MemoryNetwork, peer_id: str, method: str, *args: Any, **options: Any) -> bytes:
        num_asked["standing"] += method.startswith("train.standing")
        return await call(self, peer_id, method, *args, **options)

    async def counted_lookup(self: MemoryNetwork, *args: Any, **options: Any) -> list[Envelope]:
        num_asked["lookup"] += 1
        return await lookup(self, *args, **options)

    monkeypatch.setattr(MemoryNetwork, "call", counted_call)
    monkeypatch.setattr(MemoryNetwork, "lookup", counted_lookup)

    async def asked_a_minute(num_members: int, interval_s: float) -> tuple[float, float]:
        async with Swarm(config(min_group=num_members, outer_steps=5, interval_steps=5)) as swarm:
            for index in range(num_members):
                await swarm.join(f"m{index}", inner=SyntheticInner(virtual_step_s=interval_s / 5))
            await asyncio.sleep(1.3 * interval_s)
            num_asked.update(standing=0, lookup=0)
            await asyncio.sleep(0.6 * interval_s)
            steps = {member.trainer.state.outer_step for member in swarm.members.values() if member.trainer.state}
            assert steps == {1}  # after a committed step all know each other
            minutes = num_members * 0.6 * interval_s / 60
            return num_asked["standing"] / minutes, num_asked["lookup"] / minutes

    few, many = virtual_time.run(asked_a_minute(3, 600.0)), virtual_time.run(asked_a_minute(6, 600.0))
    assert few == pytest.approx(many, rel=0.1)
    assert many == pytest.approx((60 / MAX_WATCH_S * NUM_WATCHED, 60 / MAX_LIST_S), rel=0.1)
    often = virtual_time.run(asked_a_minute(3, 100.0))
    assert often[0] == pytest.approx(60 / WATCH_S * NUM_WATCHED, rel=0.1)


def test_members_ask_others_more_rarely_when_their_intervals_are_longer() -> None:
    assert (watch_s(0.0), list_s(0.0)) == (watch_s(60.0), list_s(60.0)) == (WATCH_S, LIST_S)
    assert (watch_s(300.0), list_s(200.0)) == (15.0, 40.0)
    assert (watch_s(1e6), list_s(1e6)) == (MAX_WATCH_S, MAX_LIST_S)


def test_member_that_left_can_take_part_again_on_the_same_network(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="swarm")

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=6)) as swarm:
            stays, leaves = await swarm.join("stays"), await swarm.join("leaves")
            while not leaves.of(OuterStep):
                await asyncio.sleep(0.05)
            leaves.trainer.stop()
            await swarm.finish("leaves")
            await leaves.trainer.close()
            inner, events = SyntheticInner(), list[TrainingEvent]()
            again = RunMember(
                leaves.network,
                leaves.trainer._membership,
                identity_of("leaves"),
                swarm.run,
                on_event=events.append,
                options=RunMemberOptions(setup=setup_of(inner, swarm.run.config.fragments), clock=inner.clock),
            )
            try:
                await again.run()
                await swarm.finish("stays")
                assert any(isinstance(event, OuterStep) for event in events)
                assert again.state is not None
                assert stays.trainer.state is not None
                assert again.digest == stays.trainer.digest
            finally:
                await again.close()

    virtual_time.run(main())
