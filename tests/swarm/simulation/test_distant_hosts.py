"""Tests that calls between processes take the same time, and end in the same way, as calls within one process."""

from __future__ import annotations

import asyncio
import marshal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from protocol.dht_examples import PEERS
from swarm.network.interface import NotServed
from swarm.network.rate import Rate
from swarm.simulation.distant_hosts import DistantNode, WindowExchange
from swarm.simulation.scenario import Nat, Region, Scenario
from swarm.simulation.simulated_host import HostWorld, Links, Place, SimulatedHost
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerUnreachable

LATENCY_S, BYTES_PER_S = 0.1, 1e4
ASKER, ANSWERER = PEERS[:2]
PLACE = Place(region=0, nat=Nat())


class Halves:
    """Two worlds in one event loop, each with one host, whose events are exchanged at the end of each window. With
    `apart=False` both hosts are in one world."""

    def __init__(self, *, apart: bool) -> None:
        links = Links(Scenario(regions=(Region(name="eu", latency_ms=1e3 * LATENCY_S),)))
        self.worlds = [HostWorld(links) for _ in range(2)]
        pipes: Any = [{1: None}, {0: None}]
        self.exchanges = [WindowExchange(world, index, pipes[index], 1e9) for index, world in enumerate(self.worlds)]
        hosts = []
        for number, peer_id in enumerate((ASKER, ANSWERER), 1):
            home = number - 1 if apart else 0
            host = SimulatedHost(self.worlds[home], peer_id, PLACE, up=Rate(BYTES_PER_S), down=Rate(BYTES_PER_S / 2))
            hosts.append(host)
            for index, exchange in enumerate(self.exchanges):
                there = host if index == home else DistantNode(number, peer_id, PLACE, home, exchange)
                exchange.add(number, f"/ip4/10.0.0.{number}/tcp/4001", there)
        self.asker, self.answerer = hosts
        self.num_events = 0

    async def carry(self) -> None:
        """Exchange events as processes do, until cancelled."""
        while True:
            await asyncio.sleep(LATENCY_S)
            for sender, receiver in ((0, 1), (1, 0)):
                events = self.exchanges[sender]._events[receiver]
                for event in marshal.loads(marshal.dumps(events)):
                    self.exchanges[receiver]._take(event)
                self.num_events += len(events)
                events.clear()


def ended(ask: Callable[[Halves], Awaitable[Any]], *, apart: bool) -> tuple[Any, float, int, int]:
    """Return what `ask` returns or raises, the seconds that it takes, the bytes that the answerer has sent then, and
    the number of events."""

    async def main() -> tuple[Any, float, int, int]:
        halves = Halves(apart=apart)
        carrying = asyncio.create_task(halves.carry())
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        result: Any
        try:
            result = await ask(halves)
        except (PeerRefused, PeerUnreachable, NotServed, TimeoutError) as error:
            result = repr(error)
        took_s = loop.time() - began_s
        assert not any(exchange.waiting for exchange in halves.exchanges)
        carrying.cancel()
        return result, took_s, halves.answerer.sent_bytes, halves.num_events

    return virtual_time.run(main())


async def echo(_peer_id: str, request: bytes) -> bytes:
    return request * 10


async def refuse(_peer_id: str, _request: bytes) -> bytes:
    await asyncio.sleep(0.25)
    raise PeerRefused("no room", retry_after_s=3)


async def is_answered(halves: Halves) -> bytes:
    await halves.answerer.serve("echo", echo)
    first, second = await asyncio.gather(*(halves.asker.call(ANSWERER, "echo", bytes(90), timeout_s=3) for _ in "12"))
    return first + second


async def is_answered_by_a_task(halves: Halves) -> bytes:
    halves.answerer.serve_in_tasks("echo", echo)
    return await halves.asker.call(ANSWERER, "echo", b"hello")


async def is_refused(halves: Halves) -> bytes:
    halves.answerer.serve_in_tasks("full", refuse)
    return await halves.asker.call(ANSWERER, "full", b"hello")


async def is_not_served(halves: Halves) -> bytes:
    return await halves.asker.call(ANSWERER, "echo", b"hello", timeout_s=3)


async def leaves_under_way(halves: Halves) -> bytes:
    await halves.answerer.serve("echo", echo)
    asyncio.get_running_loop().call_later(LATENCY_S / 2, lambda: halves.answerer.stop(goodbye=False))
    return await halves.asker.call(ANSWERER, "echo", b"hello", timeout_s=3)


async def answers_too_late(halves: Halves) -> bytes:
    await halves.answerer.serve("echo", echo)
    return await halves.asker.call(ANSWERER, "echo", bytes(5000), timeout_s=3)


async def asks_too_late(halves: Halves) -> bytes:
    await halves.answerer.serve("echo", echo)
    return await halves.asker.call(ANSWERER, "echo", bytes(50_000), timeout_s=3)


@pytest.mark.parametrize(
    "ask",
    [
        is_answered,
        is_answered_by_a_task,
        is_refused,
        is_not_served,
        leaves_under_way,
        answers_too_late,
        asks_too_late,
    ],
)
def test_call_to_another_process_takes_the_time_and_ends_as_within_one(ask: Callable[[Halves], Awaitable[Any]]) -> None:
    result, took_s, sent_bytes, num_events = ended(ask, apart=True)
    assert num_events >= 2, "the call and its end went from one process to the other"
    expected, expected_s, expected_bytes, none = ended(ask, apart=False)
    assert none == 0
    assert (result, sent_bytes) == (expected, expected_bytes)
    assert took_s == pytest.approx(expected_s)


def test_goodbye_reaches_the_other_process_whose_calls_are_then_refused_at_once() -> None:
    async def leaves(halves: Halves) -> bytes:
        assert halves.asker.sees(ANSWERER)
        halves.answerer.stop(goodbye=True)
        await asyncio.sleep(2 * LATENCY_S)
        assert not halves.asker.sees(ANSWERER)
        return await halves.asker.call(ANSWERER, "echo", b"hello", timeout_s=3)

    result, took_s, _, num_events = ended(leaves, apart=True)
    assert "PeerUnreachable" in result
    assert took_s == pytest.approx(4 * LATENCY_S)
    assert num_events == 1


def test_answer_to_a_caller_that_gave_up_is_dropped() -> None:
    async def gives_up(halves: Halves) -> int:
        await halves.answerer.serve("echo", echo)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5 * LATENCY_S):
                await halves.asker.call(ANSWERER, "echo", b"hello")
        await asyncio.sleep(10 * LATENCY_S)
        return halves.answerer.num_sent

    assert ended(gives_up, apart=True)[0] == 1
