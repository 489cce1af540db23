from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import AsyncMock, MagicMock

import pytest
from swarm.serving.session.peer_health import (
    FAILING_S,
    LEAVING_BACKOFF_S,
    LEAVING_REST_S,
    MAX_BACKOFF_S,
    MAX_PEERS,
    REST_S,
    VIOLATION_BACKOFF_S,
    Links,
)
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation, SwarmError


def membership() -> MagicMock:
    """Knows that "a" is 7 ms away, and measures for as long as it is let."""
    return MagicMock(known_rtts_ms=lambda peer_ids: {"a": 7.0} if "a" in peer_ids else {}, rtts_ms=AsyncMock())


def run(scenario: Callable[[Links], object]) -> None:
    async def main() -> None:
        links = Links(membership())
        result = scenario(links)
        if asyncio.iscoroutine(result):
            await result
        await links.close()

    virtual_time.run(main())


def is_avoided(links: Links, peer_id: str = "a") -> bool:
    return peer_id in links.avoid


async def avoided_s(links: Links, peer_id: str = "a") -> float:
    since_s = asyncio.get_running_loop().time()
    while is_avoided(links, peer_id):
        await asyncio.sleep(0.5)
    return asyncio.get_running_loop().time() - since_s


def test_failure_again_and_again_is_avoided_twice_as_long_up_to_a_bound() -> None:
    async def scenario(links: Links) -> None:
        times = []
        for _ in range(8):
            links.failed("a", PeerTimeout("late"))
            times.append(await avoided_s(links))
        assert times == [1, 2, 4, 8, 16, 32, MAX_BACKOFF_S, MAX_BACKOFF_S]

    run(scenario)


async def barred_s(links: Links, peer_id: str = "a") -> float:
    since_s = asyncio.get_running_loop().time()
    while peer_id in links.barred:
        await asyncio.sleep(0.5)
    return asyncio.get_running_loop().time() - since_s


def test_failure_again_and_again_bars_for_two_seconds_at_most() -> None:
    async def scenario(links: Links) -> None:
        times = []
        for _ in range(8):
            links.failed("a", PeerTimeout("late"))
            times.append(await barred_s(links))
        assert times == [1, *[REST_S] * 7]

    run(scenario)


def test_failing_are_those_whose_last_call_failed_and_has_for_so_long() -> None:
    async def scenario(links: Links) -> None:
        links.failed("a", PeerTimeout("late"))
        assert (links.failing(), links.failing(10)) == ({"a"}, set())
        await asyncio.sleep(10)
        assert (links.failing(), links.failing(10)) == ({"a"}, set()), "it was not asked since"
        links.failed("a", PeerTimeout("late"))
        assert (links.failing(), links.failing(10)) == ({"a"}, {"a"})
        await asyncio.sleep(FAILING_S)
        assert links.failing() == set()
        links.failed("a", PeerTimeout("late"))
        links.worked("a")
        assert links.failing() == set()

    run(scenario)


def test_success_forgets_failures() -> None:
    async def scenario(links: Links) -> None:
        for _ in range(3):
            links.failed("a", PeerTimeout("late"))
        links.worked("a")
        assert not is_avoided(links)
        links.failed("a", PeerTimeout("late"))
        assert await avoided_s(links) == 1

    run(scenario)


@pytest.mark.parametrize(
    ("error", "rest_s", "wait_s"),
    [
        (PeerRefused("leaving"), LEAVING_REST_S, LEAVING_BACKOFF_S),
        (PeerViolation("nonsense"), VIOLATION_BACKOFF_S, VIOLATION_BACKOFF_S),
    ],
    ids=["left", "violation"],
)
def test_failure_of_each_kind_is_avoided_for_its_time(error: SwarmError, rest_s: float, wait_s: float) -> None:
    async def scenario(links: Links) -> None:
        links.failed("a", error)
        assert await barred_s(links) == rest_s
        assert rest_s + await avoided_s(links) == wait_s
        assert not is_avoided(links, "b")

    run(scenario)


def test_refusal_counts_for_as_many_tokens_or_more_and_for_as_long_as_was_said() -> None:
    async def scenario(links: Links) -> None:
        links.refused("a", 500, 7.0)
        assert not is_avoided(links)
        assert [bool(links.outlook(["a"], num_tokens, "").full) for num_tokens in (499, 500, 501)] == [
            False,
            True,
            True,
        ]
        await asyncio.sleep(3)
        links.refused("a", 100, 7.0)
        links.refused("a", 300, 7.0)
        assert (links.full(99), links.full(100)) == (set(), {"a"})
        await asyncio.sleep(7)
        assert links.full(1000) == set()
        links.refused("a", 500, 7.0)
        assert links.full(100) == set()
        links.worked("a")
        assert links.full(500) == set()

    run(scenario)


def test_rtt_is_what_is_known_of_the_servers_in_question() -> None:
    def scenario(links: Links) -> None:
        assert links.outlook(["a", "b"], 1, "").rtt_ms == {"a": 7.0}
        assert links.outlook(["b"], 1, "").rtt_ms == {}

    run(scenario)


def test_measuring_goes_on_once_at_a_time_and_ends_with_the_links() -> None:
    async def main() -> None:
        known = membership()
        measured = asyncio.Event()

        async def measure(*_arguments: object, **_options: object) -> None:
            await measured.wait()

        known.rtts_ms = AsyncMock(side_effect=measure)
        links = Links(known)
        links.measure(["a"])
        links.measure(["b"])
        await asyncio.sleep(1)
        assert [call.args for call in known.rtts_ms.await_args_list] == [(["a"],)]
        measured.set()
        await asyncio.sleep(1)
        measured.clear()
        links.measure(["b"])
        await asyncio.sleep(1)
        assert [call.args for call in known.rtts_ms.await_args_list] == [(["a"],), (["b"],)]
        await links.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_load_counts_open_sessions_and_forgets_closed_ones() -> None:
    def scenario(links: Links) -> None:
        links.opened("a")
        links.opened("a")
        links.closed("a")
        assert dict(links.load) == {"a": 1}
        links.closed("a")
        assert dict(links.load) == {}

    run(scenario)


def test_memory_of_strangers_is_bounded() -> None:
    def scenario(links: Links) -> None:
        for index in range(2 * MAX_PEERS):
            links.failed(f"q{index}", PeerTimeout("late"))
            links.refused(f"q{index}", 1, 7.0)
        assert len(links.avoid) == len(links.full(1)) == MAX_PEERS

    run(scenario)
