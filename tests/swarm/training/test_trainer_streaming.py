"""Tests fragments, overlap and mixing: replicas stay bit-identical, and communication runs during computation."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
import torch
from support.faults import Fault, FaultScript
from support.leaks import no_leaks
from support.training_swarm import PHASES, Member, Swarm, SyntheticInner, assert_equal_steps, config
from swarm.network.memory.memory_link import LinkModel
from swarm.testing import virtual_time
from swarm.training.data.corpus import Corpus
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.interval import TrainingSetup
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.run.run_tables import OuterConfig
from swarm.training.trainer_events import (
    HeldOutMeasured,
    IntervalDone,
    IntervalFailed,
    OuterStep,
    RoundAborted,
    StateFetched,
)

pytestmark = pytest.mark.usefixtures("only_errors_logged")

STEP_S = 0.1
"""Virtual seconds of an inner step."""


def streaming(**changes: object) -> RunConfig:
    """Return a run of Streaming DiLoCo as published: fragments, two steps of overlap, half of each member's own weights
    kept, 4 bits."""
    settings: dict[str, object] = {
        "fragments": 4,
        "overlap_steps": 2,
        "mixing": 0.5,
        "codec": "e3m0",
        "min_group": 2,
        "outer_steps": 8,
        "outer": OuterConfig(learning_rate=0.7, momentum=0.3),
    }
    return config(**{**settings, **changes})


def inner(step_s: float = STEP_S, **options: int) -> SyntheticInner:
    return SyntheticInner(virtual_step_s=step_s, **options)


def committed_samples(members: list[Member]) -> int:
    """Return the number of committed samples in the state, once all members agree on it."""
    states = [member.trainer.state for member in members]
    assert len({state.manifest.stripes for state in states if state}) == 1
    assert states[0] is not None
    return states[0].manifest.num_committed


@pytest.mark.parametrize(("num_members", "codec"), [(1, "e3m0"), (2, "int4"), (5, "e3m0")])
def test_streaming_run_commits_equal_states_and_lowers_the_loss(num_members: int, codec: str) -> None:
    async def main() -> None:
        with no_leaks():
            async with Swarm(streaming(min_group=num_members, codec=codec, outer_steps=12)) as swarm:
                for index in range(num_members):
                    await swarm.join(f"m{index}", inner=inner())
                members = await swarm.finish()
                assert_equal_steps(members, 12)
                for member in members:
                    assert [event.step for event in member.of(OuterStep)] == list(range(1, 13))
                    assert not member.of(RoundAborted)
                    assert not member.of(StateFetched)
                    first, *_, last = member.of(HeldOutMeasured)
                    assert last.loss < first.loss / 2
                used = sorted(sample for member in members for batch in member.inner.trained for sample in batch)
                assert len(set(used)) == len(used) == num_members * 12 * 10 == committed_samples(members)

    virtual_time.run(main())


def test_streaming_step_moves_one_fragment_and_leaves_the_others_as_they_were() -> None:
    async def main() -> None:
        async with Swarm(streaming(outer_steps=5)) as swarm:
            members = [await swarm.join(f"m{index}", inner=inner()) for index in range(2)]
            thetas = [torch.zeros(3000)]
            while len(thetas) < 6:
                await asyncio.sleep(STEP_S / 2)
                state = members[0].trainer.state
                if state is not None and state.outer_step == len(thetas):
                    thetas.append(state.theta_N.clone())
            await swarm.finish()
            for step, (before_N, after_N) in enumerate(itertools.pairwise(thetas)):
                moved_4F = (before_N != after_N).reshape(4, -1)
                assert moved_4F.any(dim=1).tolist() == [step % 4 == fragment for fragment in range(4)]

    virtual_time.run(main())


def test_member_takes_in_only_the_fragment_that_the_step_has_moved() -> None:
    """Its own work on the other fragments would be mixed with what it started from."""
    taken = list[slice]()

    class Noting(SyntheticInner):
        def take_in(self, where: slice, theta_F: torch.Tensor, mixing: float) -> None:
            taken.append(where)
            super().take_in(where, theta_F, mixing)

    async def main() -> None:
        async with Swarm(streaming(min_group=1, outer_steps=6)) as swarm:
            await swarm.join("m0", inner=Noting(virtual_step_s=STEP_S))
            await swarm.finish()
        assert taken[:4] == [slice(start, start + 750) for start in range(0, 3000, 750)]

    virtual_time.run(main())


def seconds_of_steps(overlap_steps: int, bandwidth_bytes_per_s: float) -> list[float]:
    """Return the seconds of a run's outer steps without the first and the last. Each has 10 inner steps in 1 s, and
    transfers take the time that the bandwidth allows."""
    seconds: list[float] = []

    async def main() -> None:
        link = LinkModel(latency_s=0.01, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        run = streaming(overlap_steps=overlap_steps, fragments=1, mixing=0.0, codec="int8", interval_steps=10)
        async with Swarm(run, link=link) as swarm:
            for index in range(2):
                await swarm.join(f"m{index}", inner=inner(num_values=100_000))
            members = await swarm.finish()
            assert_equal_steps(members, 8)
            seconds.extend(event.seconds for event in members[0].of(OuterStep)[1:-1])

    virtual_time.run(main())
    return seconds


def test_overlap_hides_communication_behind_computation() -> None:
    # half of 100,000 values in each direction, at a byte each, take 0.5 s
    compute_s, bandwidth = 10 * STEP_S, 200_000.0
    one_after_the_other = seconds_of_steps(0, bandwidth)
    overlapping = seconds_of_steps(8, bandwidth)
    communication_s = min(one_after_the_other) - compute_s
    assert communication_s > 0.4
    assert all(each == pytest.approx(compute_s, abs=0.02) for each in overlapping), overlapping


def test_step_takes_as_long_as_communication_when_overlap_cannot_hide_it() -> None:
    bandwidth = 40_000.0
    communication_s = min(seconds_of_steps(0, bandwidth)) - 10 * STEP_S
    assert communication_s > 2.0
    # two of the ten inner steps come after the round
    expected_s = communication_s + 2 * STEP_S
    assert all(each == pytest.approx(expected_s, abs=0.05) for each in seconds_of_steps(8, bandwidth))


def test_joiner_of_a_streaming_run_trains_in_the_interval_that_admits_it() -> None:
    async def main() -> None:
        async with Swarm(streaming(interval_steps=10, outer_steps=12)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}", inner=inner())
            while len(swarm.members["m0"].of(OuterStep)) < 3:
                await asyncio.sleep(STEP_S)
            late = await swarm.join("late", inner=inner())
            members = await swarm.finish()
            assert_equal_steps(members, 12)
            groups = {event.step: event.group for event in swarm.members["m0"].of(OuterStep)}
            admitted = next(step for step in sorted(groups) if late.peer_id in groups[step])
            # the round that admits it has no work of it yet, but the next one does
            assert late.of(IntervalDone)[0].step == admitted + 1
            assert late.peer_id in groups[admitted + 1]
            assert late.of(OuterStep)[-1].num_tokens == 4 * 10 * 8
            used = [sample for member in members for batch in member.inner.trained for sample in batch]
            assert len(set(used)) == len(used) >= committed_samples(members)

    virtual_time.run(main())


def test_member_that_leaves_a_streaming_run_is_not_waited_for() -> None:
    async def main() -> None:
        async with Swarm(streaming(outer_steps=10)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}", inner=inner())
            leaver = swarm.members["m2"]
            while len(leaver.of(OuterStep)) < 2:
                await asyncio.sleep(STEP_S)
            leaver.trainer.stop()
            await swarm.finish("m2")
            await leaver.trainer.close()
            await leaver.network.close()
            staying = await swarm.finish("m0", "m1")
            assert_equal_steps(staying, 10)
            assert leaver.trainer.state is not None
            assert leaver.trainer.state.outer_step <= 5
            assert all(event.seconds < 1.0 for event in staying[0].of(OuterStep)[1:])

    virtual_time.run(main())


@pytest.mark.parametrize("phase", PHASES[::2])
def test_kill_at_any_phase_of_a_streaming_run_leaves_the_others_with_one_state(phase: str) -> None:
    async def main() -> None:
        with no_leaks():
            swarms: list[Swarm] = []
            fault = Fault(who="*", phase=phase, what="kill", nth=3 if phase.startswith("round.sign") else 9)
            script = FaultScript([fault], kill=lambda who: swarms[0].kill(who))  # noqa: PLW0108 - it comes later
            async with Swarm(streaming(outer_steps=6), script) as swarm:
                swarms.append(swarm)
                for index in range(4):
                    await swarm.join(f"m{index}", inner=inner())
                survivors = await swarm.finish_after(script)
                script.assert_all_fired()
                assert len(survivors) == 3
                assert_equal_steps(survivors, 6)
                used = [sample for each in swarm.members.values() for batch in each.inner.trained for sample in batch]
                assert len(set(used)) >= committed_samples(survivors)

    virtual_time.run(main())


def test_member_eight_times_slower_contributes_partial_work_and_delays_nobody() -> None:
    async def main() -> None:
        run = config(interval_steps=40, interval_s=3.99, min_group=3, outer_steps=4)
        async with Swarm(run) as swarm:
            quick = [await swarm.join(f"m{index}", inner=inner()) for index in range(2)]
            slow = await swarm.join("slow", inner=inner(8 * STEP_S))
            assert_equal_steps(await swarm.finish(), 4)
            assert {event.num_steps for event in quick[0].of(IntervalDone)} == {40}
            # an inner step that has begun is finished
            assert {event.num_steps for event in slow.of(IntervalDone)} == {5}
            for event in quick[0].of(OuterStep):
                assert slow.peer_id in event.group
                assert event.num_tokens == 8 * (40 + 40 + 5)
                assert event.seconds < 40 * STEP_S + 0.1
            assert not quick[0].of(RoundAborted)

    virtual_time.run(main())


def test_member_whose_training_diverged_starts_over_and_contributes_again() -> None:
    async def main() -> None:
        async with Swarm(streaming(outer_steps=8)) as swarm:
            for index in range(2):
                await swarm.join(f"m{index}", inner=inner())
            sick = inner()
            sick.corrupt = lambda x_N: x_N * float("nan") if len(sick.trained) == 3 else x_N
            member = await swarm.join("sick", inner=sick)
            members = await swarm.finish()
            assert_equal_steps(members, 8)
            failed = [event.step for event in member.of(IntervalFailed)]
            done = [event.step for event in member.of(IntervalDone)]
            assert failed == [2]
            # it starts over from the committed state as soon as the round that it missed is over
            assert [step for step in range(1, 9) if step not in done] == failed
            assert not swarm.members["m0"].of(RoundAborted)

    virtual_time.run(main())


def test_streaming_run_with_the_real_inner_loop_lowers_the_validation_loss(
    tiny_run: RunConfig, tiny_corpus: Corpus
) -> None:
    async def main() -> None:
        run = replace(
            tiny_run,
            min_group=2,
            outer_steps=6,
            interval_steps=6,
            fragments=2,
            overlap_steps=2,
            mixing=0.5,
            codec="int4",
        )
        async with Swarm(run) as swarm:
            for index in range(2):
                model = build_model(run.model)
                bounds = Layout.of(model, run.fragments).bounds
                loop = InnerLoop(run, model, tiny_corpus)
                await swarm.join(
                    f"m{index}", setup=TrainingSetup(inner=loop, theta_N=initial_theta(run), bounds=bounds)
                )
            members = await swarm.finish()
            assert_equal_steps(members, 6)
            first, *_, last = members[0].of(HeldOutMeasured)
            assert last.loss < first.loss

    virtual_time.run(main())
