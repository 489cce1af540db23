from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from swarm.serving.links import LEAVING_BACKOFF_S, MAX_BACKOFF_S, MAX_PEERS, VIOLATION_BACKOFF_S, Links
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation, SwarmError


def run(scenario: Callable[[Links], object]) -> None:
    async def main() -> None:
        result = scenario(Links())
        if asyncio.iscoroutine(result):
            await result

    virtual_time.run(main())


def is_avoided(links: Links, peer_id: str = "a") -> bool:
    return peer_id in links.outlook(1, "").avoid


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


def test_success_forgets_failures() -> None:
    async def scenario(links: Links) -> None:
        for _ in range(3):
            links.failed("a", PeerTimeout("late"))
        links.worked("a", None)
        assert not is_avoided(links)
        links.failed("a", PeerTimeout("late"))
        assert await avoided_s(links) == 1

    run(scenario)


@pytest.mark.parametrize(
    ("error", "wait_s"),
    [
        (PeerRefused("full", retry_after_s=7), 7),
        (PeerRefused("leaving"), LEAVING_BACKOFF_S),
        (PeerViolation("nonsense"), VIOLATION_BACKOFF_S),
    ],
    ids=["asked for", "left", "violation"],
)
def test_failure_of_each_kind_is_avoided_for_its_time(error: SwarmError, wait_s: float) -> None:
    async def scenario(links: Links) -> None:
        links.failed("a", error)
        assert await avoided_s(links) == wait_s
        assert not is_avoided(links, "b")

    run(scenario)


def test_rtt_follows_what_is_measured() -> None:
    def scenario(links: Links) -> None:
        links.worked("a", 100.0)
        assert links.outlook(1, "").rtt_ms["a"] == 100.0
        for _ in range(50):
            links.worked("a", 10.0)
        assert links.outlook(1, "").rtt_ms["a"] == pytest.approx(10.0, abs=1)

    run(scenario)


def test_load_counts_open_sessions_and_forgets_closed_ones() -> None:
    def scenario(links: Links) -> None:
        links.opened("a")
        links.opened("a")
        links.closed("a")
        assert dict(links.outlook(1, "").load) == {"a": 1}
        links.closed("a")
        assert dict(links.outlook(1, "").load) == {}

    run(scenario)


def test_memory_of_strangers_is_bounded() -> None:
    def scenario(links: Links) -> None:
        for index in range(2 * MAX_PEERS):
            links.worked(f"p{index}", 1.0)
            links.failed(f"q{index}", PeerTimeout("late"))
        assert len(links.outlook(1, "").rtt_ms) == MAX_PEERS
        assert len(links.outlook(1, "").avoid) == MAX_PEERS

    run(scenario)
