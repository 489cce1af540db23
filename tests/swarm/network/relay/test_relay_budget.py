"""A relay's bytes a second, and each peer's share of them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from swarm.network.relay.relay import RelayLimits
from swarm.network.relay.relay_access import BURST_S, MAX_PIECE_BYTES, MAX_SERVED, MIN_PIECE_BYTES, Ends, RelayBudget
from swarm.network.traffic import NO_LIMITS, Traffic, TrafficLimits
from swarm.testing import virtual_time

RATE = 1_000_000


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await case()

    virtual_time.run(main())


async def carry(budget: RelayBudget, circuits: list[Ends], seconds: float) -> Counter[Ends]:
    """Return the bytes of each circuit, when all of them always have more to send."""
    passed: Counter[Ends] = Counter()

    async def copy(ends: Ends) -> None:
        while True:
            await budget.take(ends, budget.piece_bytes)
            passed[ends] += budget.piece_bytes
            await asyncio.sleep(0)

    copies = [asyncio.create_task(copy(ends)) for ends in circuits]
    await asyncio.sleep(seconds)
    for each in copies:
        each.cancel()
    await asyncio.wait(copies)
    return passed


def test_all_circuits_together_use_the_rate() -> None:
    async def case() -> None:
        budget = RelayBudget(RATE)
        for circuits in ([("a", "b")], [("a", "b"), ("b", "a"), ("c", "d")]):
            passed = sum((await carry(budget, circuits, 10.0)).values())
            assert passed == pytest.approx(10 * RATE, rel=0.03)

    run(case)


def test_peer_with_many_circuits_gets_no_more_than_one_with_a_single_circuit() -> None:
    async def case() -> None:
        opened = [("greedy", f"target {number}") for number in range(5)]
        taken = [(f"source {number}", "greedy") for number in range(5)]
        modest = ("modest", "target")
        passed = await carry(RelayBudget(RATE), [*opened, *taken, modest], 10.0)
        assert passed[modest] == pytest.approx(5 * RATE, rel=0.05)

    run(case)


def test_share_is_divided_at_once_when_a_peer_joins_and_silence_saves_nothing_up() -> None:
    async def case() -> None:
        budget, early, late = RelayBudget(RATE), ("a", "b"), ("c", "d")
        assert (await carry(budget, [early], 100.0))[early] == pytest.approx(100 * RATE, rel=0.01)
        passed = await carry(budget, [early, late], 10.0)
        assert passed[late] == pytest.approx(5 * RATE, rel=0.05)
        assert passed[early] == pytest.approx(5 * RATE, rel=0.05)

    run(case)


def test_short_message_waits_only_for_a_few_pieces_of_others() -> None:
    async def case() -> None:
        budget = RelayBudget(RATE)
        others = asyncio.create_task(carry(budget, [("a", f"b{number}") for number in range(50)], 5.0))
        await asyncio.sleep(1.0)
        waits_s = [await budget.take(("c", "d"), 100) for _ in range(10)]
        assert max(waits_s) <= 3 * budget.piece_bytes / RATE
        await others

    run(case)


def test_waiting_time_is_returned_and_unused_time_allows_a_short_burst() -> None:
    async def case() -> None:
        budget = RelayBudget(RATE)
        await asyncio.sleep(100.0)
        assert await budget.take(("a", "b"), round(RATE * BURST_S)) == 0.0
        assert await budget.take(("a", "b"), RATE) == 0.0
        assert await budget.take(("a", "b"), RATE) == pytest.approx(1.0)

    run(case)


def test_circuit_that_ends_while_it_waits_takes_nothing() -> None:
    async def case() -> None:
        budget = RelayBudget(RATE)
        await budget.take(("a", "b"), 2 * RATE)
        waiting = [asyncio.create_task(budget.take((f"{number}", "b"), RATE)) for number in range(3)]
        await asyncio.sleep(0)
        for each in waiting[:2]:
            each.cancel()
        assert await waiting[2] <= 2.0
        assert await budget.take(("a", "b"), 1) == pytest.approx(1.0)

    run(case)


@pytest.mark.parametrize(
    ("rate", "num_bytes"),
    [(math.inf, MAX_PIECE_BYTES), (RATE, 20_000), (1000, MIN_PIECE_BYTES), (10**10, MAX_PIECE_BYTES)],
)
def test_pieces_are_short_where_the_rate_is_low(rate: float, num_bytes: int) -> None:
    assert RelayBudget(rate).piece_bytes == num_bytes


def test_budget_delays_nobody_without_a_limit_and_drops_past_peers_with_one() -> None:
    async def case() -> None:
        charged: list[int] = []
        assert await RelayBudget(charge=charged.append).take(("a", "b"), 10**12) == 0.0
        assert charged == [10**12]
        budget = RelayBudget(RATE)
        for number in range(3 * MAX_SERVED):
            await budget.take((f"a{number}", f"b{number}"), 1000)
        assert len(budget._served) <= MAX_SERVED + 1

    run(case)


def test_owner_s_limits_leave_half_to_the_relay_and_are_charged_for_what_it_carries() -> None:
    async def case() -> None:
        limits = TrafficLimits(up_bytes_per_s=RATE, down_bytes_per_s=4 * RATE)
        assert RelayLimits().within(NO_LIMITS) == math.inf
        assert RelayLimits(bytes_per_s=10 * RATE).within(limits) == RATE / 2
        assert RelayLimits(bytes_per_s=100).within(limits) == 100
        traffic = Traffic(limits)
        await RelayBudget(RATE, traffic.relayed).take(("a", "b"), RATE)
        assert traffic.total_bytes == 2 * RATE
        assert traffic.download.wait_s() > 0.2
        assert not any((*traffic.sent_bytes.values(), *traffic.received_bytes.values()))

    run(case)
