"""Tests how and when calls between simulated hosts end, and that those answered in time set no timer for their end."""

from __future__ import annotations

import asyncio

import pytest
from swarm.network.interface import NotServed
from swarm.network.rate import Rate
from swarm.simulation.scenario import Nat, Region, Scenario
from swarm.simulation.simulated_host import DIAL_TIMEOUT_S, Answer, HostWorld, Links, Place, SimulatedHost
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerUnreachable

LATENCY_S = 0.1


def two_hosts(up_bytes_per_s: float = 1e9, *, asker_up: float = 1e9) -> tuple[SimulatedHost, SimulatedHost]:
    """Return a host that asks, at `asker_up` bytes per second, and one that answers at `up_bytes_per_s`."""
    world = HostWorld(Links(Scenario(regions=(Region(name="eu", latency_ms=1e3 * LATENCY_S),))))
    place = Place(region=0, nat=Nat())
    asker = SimulatedHost(world, "asker", place, up=Rate(asker_up), down=Rate(1e9))
    return asker, SimulatedHost(world, "answerer", place, up=Rate(up_bytes_per_s), down=Rate(1e9))


async def serve_echo(host: SimulatedHost) -> None:
    async def echo(_peer_id: str, request: bytes) -> bytes:
        return request

    await host.serve("echo", echo)


async def seconds_until_timeout(asker: SimulatedHost, timeout_s: float) -> float:
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await asker.call("answerer", "echo", b"hello", timeout_s=timeout_s)
    return asyncio.get_running_loop().time() - began_s


def test_call_that_is_answered_in_time_takes_both_ways_and_sets_no_timer_for_its_end() -> None:
    async def main() -> None:
        asker, answerer = two_hosts()
        await serve_echo(answerer)
        loop = asyncio.get_running_loop()
        began_s, timers = loop.time(), loop._timers  # type: ignore[attr-defined]
        assert await asker.call("answerer", "echo", b"hello", timeout_s=3) == b"hello"
        assert loop.time() - began_s == pytest.approx(2 * LATENCY_S, rel=1e-3)
        assert timers == []

    virtual_time.run(main())


def test_call_of_a_host_that_ends_while_the_message_is_under_way_times_out() -> None:
    async def main() -> None:
        asker, answerer = two_hosts()
        await serve_echo(answerer)
        asyncio.get_running_loop().call_later(LATENCY_S / 2, lambda: answerer.stop(goodbye=True))
        assert await seconds_until_timeout(asker, 3) == pytest.approx(3)

    virtual_time.run(main())


def test_answer_over_a_slow_link_comes_too_late() -> None:
    async def main() -> None:
        asker, answerer = two_hosts(up_bytes_per_s=10)
        await serve_echo(answerer)
        assert await seconds_until_timeout(asker, 3) == pytest.approx(3)

    virtual_time.run(main())


def test_request_that_a_slow_link_delays_times_out_before_it_arrives() -> None:
    async def main() -> None:
        asker, answerer = two_hosts(asker_up=10)
        await serve_echo(answerer)
        assert await seconds_until_timeout(asker, 3) == pytest.approx(3)
        assert answerer.num_sent == 0
        await asyncio.sleep(60)
        assert answerer.num_sent == 0, "nobody waits for the answer any more"

    virtual_time.run(main())


def test_dial_of_a_host_that_left_without_a_word_ends_at_the_time_out() -> None:
    async def main() -> None:
        asker, answerer = two_hosts()
        answerer.stop(goodbye=False)
        assert await seconds_until_timeout(asker, DIAL_TIMEOUT_S / 2) == pytest.approx(DIAL_TIMEOUT_S / 2)
        with pytest.raises(PeerUnreachable):
            await asker.call("answerer", "echo", b"hello", timeout_s=2 * DIAL_TIMEOUT_S)

    virtual_time.run(main())


def test_host_that_left_with_a_goodbye_refuses_at_once() -> None:
    async def main() -> None:
        asker, answerer = two_hosts()
        assert asker.sees("answerer")
        answerer.stop(goodbye=True)
        assert not asker.sees("answerer")
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(PeerUnreachable):
            await asker.call("answerer", "echo", b"hello", timeout_s=3)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(2 * LATENCY_S)

    virtual_time.run(main())


def test_error_of_a_handler_that_waits_reaches_the_caller_as_over_a_wire() -> None:
    async def refuse(_peer_id: str, _request: bytes) -> bytes:
        await asyncio.sleep(0.25)
        raise PeerRefused("no room", retry_after_s=3)

    async def main() -> None:
        asker, answerer = two_hosts()
        answerer.serve_in_tasks("full", refuse)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(PeerRefused, match="no room") as error:
            await asker.call("answerer", "full", b"hello")
        assert (error.value.peer_id, error.value.retry_after_s) == ("answerer", 3)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(0.25 + 2 * LATENCY_S, rel=1e-3)
        with pytest.raises(NotServed):
            await asker.call("answerer", "echo", b"hello")

    virtual_time.run(main())


def test_caller_that_gives_up_ends_the_work_of_the_handler() -> None:
    async def main() -> None:
        ended = list[float]()

        async def work(_peer_id: str, _request: bytes) -> bytes:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(asyncio.get_running_loop().time() - began_s)
            return b""

        asker, answerer = two_hosts()
        answerer.serve_in_tasks("work", work)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asker.call("answerer", "work", b"hello")
        await asyncio.sleep(0.1)
        assert ended == [pytest.approx(1)]
        assert answerer.num_sent == 0

    virtual_time.run(main())


def answer_after(seconds: float, response: bytes = b"") -> Answer:
    loop = asyncio.get_running_loop()
    answer = Answer(loop=loop)
    loop.call_later(seconds, answer.resolve, response)
    return answer


def test_answer_wakes_a_task_and_only_the_first_one_counts() -> None:
    async def main() -> None:
        answer = answer_after(1, b"first")
        asyncio.get_running_loop().call_later(1, answer.resolve, b"second")
        asyncio.get_running_loop().call_later(1, answer.reject, TimeoutError())
        assert await asyncio.create_task(asyncio.wait_for(answer, 5)) == b"first"
        refused = Answer(loop=asyncio.get_running_loop())
        asyncio.get_running_loop().call_later(1, refused.reject, TimeoutError())
        with pytest.raises(TimeoutError):
            await refused

    virtual_time.run(main())
