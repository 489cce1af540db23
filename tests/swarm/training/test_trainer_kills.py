"""Tests that when a member dies without notice at any phase of a step, the others go on soon and with one state."""

from __future__ import annotations

import asyncio

import pytest
from support.faults import Fault, FaultScript
from support.leaks import no_leaks
from support.training_swarm import PHASES, Member, Swarm, assert_equal_steps, config
from swarm.network.memory.memory_link import LinkModel
from swarm.testing import virtual_time
from swarm.training.trainer_events import OuterStep, RoundAborted
from swarm_protocol.identity import short_id

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NUM_STEPS = 3
"""The second is struck, too, and the third shows that the others go on."""
UNDISTURBED_S = 2.2
"""Virtual seconds of a run without a kill, of which 2 are the first group's grace."""


def run_with_kill(
    fault: Fault,
    *,
    num_members: int = 4,
    min_group: int = 1,
    num_steps: int = NUM_STEPS,
    link: LinkModel | None = None,
) -> list[Member]:
    """Return the members of a run in which `fault` struck, including the dead one. The survivors' states have been
    compared."""

    async def main() -> list[Member]:
        with no_leaks():
            swarms: list[Swarm] = []
            script = FaultScript([fault], kill=lambda who: swarms[0].kill(who))  # noqa: PLW0108 - it comes later
            run = config(min_group=min_group, outer_steps=num_steps)
            async with Swarm(run, script, link=link or LinkModel(latency_s=0.005)) as swarm:
                swarms.append(swarm)
                for index in range(num_members):
                    await swarm.join(f"m{index}")
                started = asyncio.get_running_loop().time()
                survivors = await swarm.finish_after(script)
                script.assert_all_fired()
                took_s = asyncio.get_running_loop().time() - started
                assert took_s < UNDISTURBED_S + 3.0, "the kill cost 3 s or more"
                assert len(survivors) == num_members - 1
                assert_equal_steps(survivors, num_steps)
                members = list(swarm.members.values())
                _assert_members_reported_equal_states(members)
                return members

    return virtual_time.run(main())


def _assert_members_reported_equal_states(members: list[Member]) -> None:
    """Assert that all members which reported a state of a step as committed reported the same one."""
    for step in range(1, NUM_STEPS + 1):
        digests = {event.digest for each in members for event in each.of(OuterStep) if event.step == step}
        assert len(digests) <= 1


# the first member that reaches the phase, and one in the next step
@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize("phase", PHASES)
def test_kill_of_any_member_at_any_phase_leaves_the_others_with_one_state(phase: str, nth: int) -> None:
    nth = min(nth, 4) if phase.startswith("round.sign") else nth
    run_with_kill(Fault(who="*", phase=phase, what="kill", nth=nth), num_steps=2 if nth == 1 else NUM_STEPS)


@pytest.mark.parametrize("phase", PHASES)
def test_kill_of_one_of_two_members_lets_the_other_finish(phase: str) -> None:
    run_with_kill(Fault(who="*", phase=phase, what="kill", nth=2), num_members=2, num_steps=2)


@pytest.mark.parametrize("phase", ["round.reduced", "round.vote"])
def test_kill_of_one_of_six_members_over_uneven_links_leaves_one_state(phase: str) -> None:
    link = LinkModel(latency_s=0.02, jitter_s=0.04)
    run_with_kill(Fault(who="*", phase=phase, what="kill", nth=6), num_members=6, min_group=2, num_steps=2, link=link)


def test_aborted_round_names_a_killed_coordinator() -> None:
    members = run_with_kill(Fault(who="*", phase="round.signed", what="kill", nth=2))
    dead = next(member for member in members if not member.is_alive)
    aborted = [event for member in members for event in member.of(RoundAborted)]
    assert aborted
    for event in aborted:
        assert short_id(dead.peer_id) in event.reason
        assert event.missing == (dead.peer_id,)


def test_step_is_committed_when_an_owner_dies_after_it_has_served_one_member() -> None:
    """The one member with all parts votes. The others cannot finish their reduction, and fetch the parts from it."""

    async def main() -> None:
        swarms: list[Swarm] = []
        served: list[str] = []

        async def serve_one_then_die(who: str) -> None:
            # the first delivery is sent and the others wait; the owner dies once it has arrived
            served.append(who)
            if len(served) > 1:
                await asyncio.sleep(0.05)
                if swarms[0].members[who].is_alive:
                    swarms[0].kill(who)
                await asyncio.Event().wait()

        class Hook:
            async def reached(self, phase: str) -> None:
                if phase == "round.deliver" and swarms[0].members["m0"].of(OuterStep):
                    await serve_one_then_die("m0")

        class Script:
            def hook(self, who: str) -> object:
                return Hook() if who == "m0" else _Silent()

        async with Swarm(config(min_group=2, outer_steps=4)) as swarm:
            swarms.append(swarm)
            swarm.script = Script()  # type: ignore[assignment]
            for index in range(4):
                await swarm.join(f"m{index}")
            survivors = await swarm.finish("m1", "m2", "m3")
            assert not swarm.members["m0"].is_alive
            assert_equal_steps(survivors, 4)
            # the step in which the owner died was committed with its contribution, in the first attempt
            group = next(event.group for event in survivors[0].of(OuterStep) if event.step == 2)
            assert swarm.members["m0"].peer_id in group
            assert not any(event.step == 2 for each in survivors for event in each.of(RoundAborted))

    virtual_time.run(main())


class _Silent:
    async def reached(self, phase: str) -> None:
        pass


def test_next_attempt_finishes_votes_that_nobody_counted() -> None:
    """All members vote, and no vote arrives. Members report their locks, and the next group decides the same
    outcome."""

    async def main() -> None:
        async with Swarm(config(min_group=3, outer_steps=3)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}")
            lost: list[str] = []
            for member in swarm.members.values():
                honest = member.network.call

                async def call(
                    peer_id: str, method: str, request: bytes, *, honest: object = honest, **bounds: object
                ) -> bytes:
                    if method.startswith("train.vote") and len(lost) < 6 and swarm.members["m0"].of(OuterStep):
                        lost.append(peer_id)
                        return b""
                    return await honest(peer_id, method, request, **bounds)  # type: ignore[operator]

                member.network.call = call  # type: ignore[method-assign]
            members = await swarm.finish()
            assert len(lost) == 6
            assert_equal_steps(members, 3)
            aborted = [event for member in members for event in member.of(RoundAborted)]
            assert {event.step for event in aborted} == {2}
            assert all("no vote from" in event.reason for event in aborted)
            # nothing was trained or reduced twice
            for member in members:
                assert len(member.inner.trained) == 3

    virtual_time.run(main())
