from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from unittest.mock import AsyncMock, MagicMock

import pytest
from swarm.serving.session.peer_health import (
    FAILING_S,
    GONE_BACKOFF_S,
    GONE_REST_S,
    HEARD_S,
    LEAVING_BACKOFF_S,
    LEAVING_REST_S,
    MAX_BACKOFF_S,
    MAX_PEERS,
    MAX_WOKEN,
    REST_S,
    VIOLATION_BACKOFF_S,
    PeerHealth,
)
from swarm.serving.session.repair import OPEN_S
from swarm.serving.session.session_actions import AvoidPeer, FailureCause
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerError, PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError


def membership() -> MagicMock:
    """A membership that knows that "a" is 7 ms away, and measures until it is stopped."""
    return MagicMock(known_rtts_ms=lambda peer_ids: {"a": 7.0} if "a" in peer_ids else {}, rtts_ms=AsyncMock())


def run(scenario: Callable[[PeerHealth], object]) -> None:
    async def main() -> None:
        health = PeerHealth(membership())
        result = scenario(health)
        if asyncio.iscoroutine(result):
            await result
        await health.close()

    virtual_time.run(main())


def is_avoided(health: PeerHealth, peer_id: str = "a") -> bool:
    return peer_id in health.avoid


async def avoided_s(health: PeerHealth, peer_id: str = "a") -> float:
    since_s = asyncio.get_running_loop().time()
    while is_avoided(health, peer_id):
        await asyncio.sleep(0.5)
    return asyncio.get_running_loop().time() - since_s


async def each_time_s(
    health: PeerHealth, error: SwarmError, num_times: int, until_over: Callable[[PeerHealth], Awaitable[float]]
) -> list[float]:
    """Return the seconds until it is over, after each of `num_times` failures in a row."""
    times = []
    for _ in range(num_times):
        health.failed("a", error)
        times.append(await until_over(health))
    return times


def test_failing_peer_is_avoided_twice_as_long_each_time_up_to_a_bound() -> None:
    async def scenario(health: PeerHealth) -> None:
        times = await each_time_s(health, PeerError("broken"), 8, avoided_s)
        assert times == [1, 2, 4, 8, 16, 32, MAX_BACKOFF_S, MAX_BACKOFF_S]

    run(scenario)


@pytest.mark.parametrize("error", [PeerTimeout("silent"), PeerUnreachable("a dial had no answer")], ids=repr)
def test_peer_that_is_gone_is_avoided_for_longer_than_an_answer_would_wait_for_it(error: PeerError) -> None:
    async def scenario(health: PeerHealth) -> None:
        times = await each_time_s(health, error, 4, avoided_s)
        assert times[0] > OPEN_S
        assert times == [GONE_BACKOFF_S, 2 * GONE_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]

    run(scenario)


def test_peer_that_says_that_it_waited_in_vain_is_not_taken_for_silent() -> None:
    async def scenario(health: PeerHealth) -> None:
        late = PeerTimeout("the tokens before this one were not sent", peer_id="a")
        health.blame(AvoidPeer("a", late, FailureCause.REPORTED), 500)
        assert await avoided_s(health) == 1

    run(scenario)


def test_peer_that_failed_a_thousand_times_is_avoided_for_the_bound() -> None:
    async def scenario(health: PeerHealth) -> None:
        # doubled as often, a time is beyond the largest number
        times = await each_time_s(health, PeerError("broken"), 1100, avoided_s)
        assert times[-1] == MAX_BACKOFF_S

    run(scenario)


def test_peer_that_broke_the_protocol_stays_barred_whatever_its_other_sessions_see() -> None:
    async def scenario(health: PeerHealth) -> None:
        health.failed("a", PeerViolation("lied"))
        health.failed("a", PeerUnreachable("the connection is closed"))
        health.worked("a")
        await asyncio.sleep(VIOLATION_BACKOFF_S - 1)
        assert "a" in health.barred & health.avoid

    run(scenario)


def test_avoided_peers_are_told_with_why_they_are_and_not_with_an_earlier_failure() -> None:
    async def main() -> None:
        convicted = set[str]()
        health = PeerHealth(membership(), convicted=lambda: frozenset(convicted))
        for peer_id in ("recovered", "convicted", "rested", "violent"):
            health.failed(peer_id, PeerTimeout("silent"))
        health.worked("recovered")
        await asyncio.sleep(GONE_BACKOFF_S)
        convicted.add("convicted")
        health.failed("violent", PeerViolation("it sent nonsense"))
        health.failed("violent", PeerTimeout("silent"))
        health.failed("failing", PeerError("broken"))
        assert health.why_avoided == {
            "convicted": "evidence convicts it of a lie",
            "failing": "broken",
            "violent": "it sent nonsense",
        }
        assert health.routing_context(["failing"], 1, "").why_barred == health.why_avoided

    virtual_time.run(main())


def test_sessions_that_lose_one_server_together_count_as_one_failure() -> None:
    async def scenario(health: PeerHealth) -> None:
        for _ in range(16):
            health.failed("a", PeerTimeout("late"))
            await asyncio.sleep(0.5)
        assert await avoided_s(health) == GONE_BACKOFF_S - 0.5, "since the last of them"
        health.failed("a", PeerTimeout("late"))
        assert await avoided_s(health) == 2 * GONE_BACKOFF_S

    run(scenario)


async def barred_s(health: PeerHealth, peer_id: str = "a") -> float:
    since_s = asyncio.get_running_loop().time()
    while peer_id in health.barred:
        await asyncio.sleep(0.25)
    return asyncio.get_running_loop().time() - since_s


@pytest.mark.parametrize(
    ("error", "first_s"),
    [
        (PeerError("broken"), [1, REST_S]),
        (PeerTimeout("silent"), [0.25, 0.5, 1, REST_S]),
        (PeerUnreachable("gone"), [0.25, 0.5, 1, REST_S]),
    ],
    ids=repr,
)
def test_failing_peer_is_barred_for_longer_each_time_and_two_seconds_at_most(
    error: PeerError, first_s: list[float]
) -> None:
    async def scenario(health: PeerHealth) -> None:
        assert await each_time_s(health, error, 8, barred_s) == [*first_s, *[REST_S] * (8 - len(first_s))]
        health.worked("a")
        assert await each_time_s(health, error, 2, barred_s) == first_s[:2]

    run(scenario)


def test_sessions_that_lose_one_server_together_bar_it_as_one_failure_does() -> None:
    async def scenario(health: PeerHealth) -> None:
        for _ in range(16):
            health.failed("a", PeerTimeout("silent"))
        assert await barred_s(health) == GONE_REST_S

    run(scenario)


def test_search_is_ended_when_the_first_of_its_servers_may_be_asked_again_and_else_goes_on() -> None:
    async def scenario(health: PeerHealth) -> None:
        clock = asyncio.get_running_loop().time
        health.failed("broken", PeerError("broken"))
        health.failed("silent", PeerTimeout("silent"))
        for peers, expected_s in ((("silent", "broken"), GONE_REST_S), (("broken",), 1 - GONE_REST_S), (("b",), 10)):
            since_s = clock()
            async with health.until_rested(peers):
                await asyncio.sleep(10)
            assert clock() - since_s == expected_s

    run(scenario)


def test_searches_go_on_at_once_when_a_server_that_failed_has_answered() -> None:
    async def scenario(health: PeerHealth) -> None:
        health.failed("a", PeerTimeout("silent"))
        async with asyncio.timeout(1), asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(health.wait_for_server((), 0.0, within_s=10))
            await asyncio.sleep(0.1)
            health.worked("a")

    run(scenario)


def test_few_searches_go_on_at_once_when_many_wait_for_a_server_that_has_answered() -> None:
    """All sessions of a gateway would open on it in the same moment, and send it their prompts."""

    async def scenario(health: PeerHealth) -> None:
        clock, over_s = asyncio.get_running_loop().time, dict[int, float]()

        async def search(number: int) -> None:
            await health.wait_for_server((), since_s=-float(number), within_s=10)
            over_s[number] = clock()

        health.failed("a", PeerTimeout("silent"))
        since_s = clock()
        async with asyncio.TaskGroup() as tasks:
            for number in range(3 * MAX_WOKEN):
                tasks.create_task(search(number))
            await asyncio.sleep(0.1)
            health.worked("a")
            await asyncio.sleep(0.1)
            assert sorted(over_s) == list(range(2 * MAX_WOKEN, 3 * MAX_WOKEN)), "those that have waited longest"
        assert {at_s - since_s for number, at_s in over_s.items() if number < 2 * MAX_WOKEN} == {10.0}

    run(scenario)


def test_failing_peers_are_those_whose_last_call_failed_for_at_least_the_given_time() -> None:
    async def scenario(health: PeerHealth) -> None:
        health.failed("a", PeerTimeout("late"))
        assert (health.failing(), health.failing(10)) == ({"a"}, set())
        await asyncio.sleep(10)
        assert (health.failing(), health.failing(10)) == ({"a"}, set()), "it was not called since"
        health.failed("a", PeerTimeout("late"))
        assert (health.failing(), health.failing(10)) == ({"a"}, {"a"})
        await asyncio.sleep(FAILING_S)
        assert health.failing() == set()
        health.failed("a", PeerTimeout("late"))
        health.worked("a")
        assert health.failing() == set()

    run(scenario)


def test_success_clears_failures() -> None:
    async def scenario(health: PeerHealth) -> None:
        for _ in range(3):
            health.failed("a", PeerTimeout("late"))
        health.worked("a")
        assert not is_avoided(health)
        health.failed("a", PeerError("broken"))
        assert await avoided_s(health) == 1

    run(scenario)


@pytest.mark.parametrize(
    ("error", "rest_s", "wait_s"),
    [
        (PeerRefused("leaving"), LEAVING_REST_S, LEAVING_BACKOFF_S),
        (PeerViolation("nonsense"), VIOLATION_BACKOFF_S, VIOLATION_BACKOFF_S),
    ],
    ids=["left", "violation"],
)
def test_peer_is_avoided_for_the_time_of_its_kind_of_failure(error: SwarmError, rest_s: float, wait_s: float) -> None:
    async def scenario(health: PeerHealth) -> None:
        health.failed("a", error)
        assert await barred_s(health) == rest_s
        assert rest_s + await avoided_s(health) == wait_s
        assert not is_avoided(health, "b")

    run(scenario)


def test_refusal_counts_for_equal_or_larger_requests_until_its_retry_time() -> None:
    async def scenario(health: PeerHealth) -> None:
        health.refused("a", 500, 7.0)
        assert not is_avoided(health)
        assert [bool(health.routing_context(["a"], num_tokens, "").full) for num_tokens in (499, 500, 501)] == [
            False,
            True,
            True,
        ]
        await asyncio.sleep(3)
        health.refused("a", 100, 7.0)
        health.refused("a", 300, 7.0)
        assert (health.full(99), health.full(100)) == (set(), {"a"})
        await asyncio.sleep(7)
        assert health.full(1000) == set()
        health.refused("a", 500, 7.0)
        assert health.full(100) == set()
        health.worked("a")
        assert health.full(500) == {"a"}
        health.made_room("a")
        assert health.full(500) == set()

    run(scenario)


def test_refusal_of_a_grammar_keeps_only_sessions_with_a_grammar_from_a_peer() -> None:
    async def scenario(health: PeerHealth) -> None:
        no_place = PeerRefused("all places for grammars are taken", retry_after_s=7.0)
        health.blame(AvoidPeer("a", no_place, FailureCause.REPORTED), 500, has_grammar=True)
        health.blame(AvoidPeer("b", no_place, FailureCause.REPORTED), 500)
        no_room = PeerRefused("the server is full", retry_after_s=7.0, lacks_room=True)
        health.blame(AvoidPeer("c", no_room, FailureCause.REPORTED), 500, has_grammar=True)
        assert not is_avoided(health)
        assert (health.full(500), health.full(500, has_grammar=True)) == ({"b", "c"}, {"a", "b", "c"})
        health.made_room("a")
        health.made_room("c")
        assert health.full(500, has_grammar=True) == {"b"}

    run(scenario)


def test_peer_that_never_has_room_for_a_session_is_not_avoided_for_smaller_ones() -> None:
    async def scenario(health: PeerHealth) -> None:
        health.refused("b", 500, 7.0)
        refusal = PeerRefused("too small", lacks_room=True)
        health.blame(AvoidPeer("a", refusal, FailureCause.REPORTED), 500)
        assert not is_avoided(health)
        assert (health.full(499), health.full(500), health.full(500, for_good=True)) == (set(), {"a", "b"}, {"a"})
        health.made_room("a")
        assert health.full(500) == {"a", "b"}
        await asyncio.sleep(FAILING_S)
        assert health.full(500) == set()

    run(scenario)


def test_routing_context_has_the_known_rtts_of_the_given_servers() -> None:
    def scenario(health: PeerHealth) -> None:
        assert health.routing_context(["a", "b"], 1, "").rtt_ms == {"a": 7.0}
        assert health.routing_context(["b"], 1, "").rtt_ms == {}

    run(scenario)


def test_measuring_runs_once_at_a_time_and_ends_with_the_connections() -> None:
    async def main() -> None:
        known = membership()
        measured = asyncio.Event()

        async def measure(*_arguments: object, **_options: object) -> None:
            await measured.wait()

        known.rtts_ms = AsyncMock(side_effect=measure)
        health = PeerHealth(known)
        health.measure(["a"])
        health.measure(["b"])
        await asyncio.sleep(1)
        assert [call.args for call in known.rtts_ms.await_args_list] == [(["a"],)]
        measured.set()
        await asyncio.sleep(1)
        measured.clear()
        health.measure(["b"])
        await asyncio.sleep(1)
        assert [call.args for call in known.rtts_ms.await_args_list] == [(["a"],), (["b"],)]
        await health.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_silent_peers_are_pinged_once_for_all_sessions_and_not_if_one_has_just_heard_of_them() -> None:
    async def main() -> None:
        known = membership()

        async def silent(peer_ids: list[str], *, timeout_s: float) -> set[str]:
            await asyncio.sleep(timeout_s if peer_ids == ["stopped"] else 0.01)
            return {"stopped"} & set(peer_ids)

        known.silent = AsyncMock(side_effect=silent)
        health = PeerHealth(known)
        asked = [health.silent({"stopped", "there"}, timeout_s=1.0) for _ in range(5)]
        assert await asyncio.gather(*asked) == [{"stopped"}] * 5
        assert known.silent.await_count == 2
        hurried, patient = (asyncio.create_task(health.silent(["stopped"], timeout_s=each)) for each in (1.0, 3.0))
        await asyncio.sleep(2)
        assert hurried.done()
        assert not patient.done(), "a patient session must not judge by a hurried ping"
        assert await patient == {"stopped"}
        health.worked("stopped")
        assert await health.silent(["stopped"], timeout_s=1.0) == set()
        await asyncio.sleep(2 * HEARD_S)
        leaving = asyncio.create_task(health.silent(["stopped"], timeout_s=1.0))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await health.close()
        assert asyncio.all_tasks() - {leaving} == {asyncio.current_task()}

    virtual_time.run(main())


def test_load_counts_open_sessions_and_forgets_closed_ones() -> None:
    def scenario(health: PeerHealth) -> None:
        health.opened("a")
        health.opened("a")
        health.closed("a")
        assert dict(health.load) == {"a": 1}
        health.closed("a")
        assert dict(health.load) == {}

    run(scenario)


def test_memory_of_strangers_is_bounded() -> None:
    def scenario(health: PeerHealth) -> None:
        for index in range(2 * MAX_PEERS):
            health.failed(f"q{index}", PeerTimeout("late"))
            health.refused(f"q{index}", 1, 7.0)
        assert len(health.avoid) == len(health.full(1)) == MAX_PEERS

    run(scenario)
