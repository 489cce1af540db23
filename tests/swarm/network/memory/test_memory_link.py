"""The simulated link: the time that bytes take, the order that is kept, and that a seed decides everything."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from functools import partial

import pytest
from swarm.network.memory.memory_link import FRAME_BYTES, OVERHEAD_BYTES, RETRANSMIT_S, LinkModel, Pipe
from swarm.network.rate import Rate
from swarm.testing import virtual_time


def make_pipe(link: LinkModel, *, up: float = math.inf, down: float = math.inf, seed: int = 0) -> Pipe:
    return Pipe(link, up=Rate(up), down=Rate(down), rng=partial(random.Random, seed))


def arrivals(send: Callable[[Callable[[object, str, int], None]], None], link: LinkModel, *, seed: int = 0) -> list:
    """Return when each message that `send` puts on a fresh pipe arrives, in order of arrival."""

    async def main() -> list:
        loop = asyncio.get_running_loop()
        pipe, start_s, seen, expected = make_pipe(link, seed=seed), loop.time(), [], []
        done = asyncio.Event()

        def put(flow: object, name: str, num_bytes: int) -> None:
            def arrive() -> None:
                seen.append((name, loop.time() - start_s))
                if len(seen) == len(expected):
                    done.set()

            expected.append(name)
            pipe.put(flow, num_bytes, arrive)

        send(put)
        await done.wait()
        return seen

    return virtual_time.run(main())


def test_link_with_impossible_values_is_refused() -> None:
    for wrong in (
        {"latency_s": -1.0},
        {"latency_s": math.nan},
        {"jitter_s": math.inf},
        {"bandwidth_bytes_per_s": 0.0},
        {"bandwidth_bytes_per_s": math.nan},
        {"loss": 1.0},
        {"loss": -0.1},
    ):
        with pytest.raises(ValueError, match="must be"):
            LinkModel(**wrong)


def test_pipe_takes_the_sum_of_latency_and_transmission_time() -> None:
    link = LinkModel(latency_s=0.05, bandwidth_bytes_per_s=1e6)
    [(_, arrival_s)] = arrivals(lambda put: put("flow", "big", 2_000_000), link)
    assert arrival_s == pytest.approx(0.05 + (2_000_000 + OVERHEAD_BYTES) / 1e6)


def test_pipe_with_two_flows_shares_the_rate() -> None:
    def send(put: Callable) -> None:
        put("a", "long", 10 * FRAME_BYTES)
        put("b", "short", FRAME_BYTES - OVERHEAD_BYTES)

    link = LinkModel(bandwidth_bytes_per_s=FRAME_BYTES)
    times = dict(arrivals(send, link))
    assert times["short"] == pytest.approx(3)  # and not after the 10 s of the long one
    assert times["long"] == pytest.approx(11, rel=0.01)


def test_pipe_with_one_flow_keeps_its_order() -> None:
    def send(put: Callable) -> None:
        put("a", "long", 3 * FRAME_BYTES)
        put("a", "short", 1)

    link = LinkModel(bandwidth_bytes_per_s=FRAME_BYTES, jitter_s=0.5, loss=0.2)
    assert [name for name, _ in arrivals(send, link)] == ["long", "short"]


def test_pipe_with_jitter_and_loss_never_reorders_and_loses_nothing() -> None:
    def send(put: Callable) -> None:
        for index in range(300):
            put("flow", str(index), 100)

    link = LinkModel(latency_s=0.01, jitter_s=0.2, loss=0.3)
    seen = arrivals(send, link)
    assert [name for name, _ in seen] == [str(index) for index in range(300)]
    assert seen[-1][1] > RETRANSMIT_S


def test_pipe_with_same_seed_repeats_and_with_another_differs() -> None:
    def send(put: Callable) -> None:
        for index in range(50):
            put(index % 3, str(index), 5000)

    link = LinkModel(latency_s=0.01, jitter_s=0.2, bandwidth_bytes_per_s=1e5, loss=0.05)
    assert arrivals(send, link, seed=1) == arrivals(send, link, seed=1)
    assert arrivals(send, link, seed=1) != arrivals(send, link, seed=2)


def test_pipes_with_one_uplink_share_it() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        uplink, start_s, arrived = Rate(1e6), loop.time(), []
        done = asyncio.Event()
        for _ in range(4):
            pipe = Pipe(LinkModel(), up=uplink, down=Rate(math.inf), rng=random.Random)
            pipe.put("flow", 1_000_000, lambda: arrived.append(1) or (len(arrived) == 4 and done.set()))
        await done.wait()
        return loop.time() - start_s

    assert virtual_time.run(main()) == pytest.approx(4, rel=0.01)


def test_pipe_while_held_delivers_nothing_until_released() -> None:
    async def main() -> None:
        pipe, seen = make_pipe(LinkModel(latency_s=0.1)), []
        pipe.put("flow", 1, lambda: seen.append("first"))
        pipe.hold()
        pipe.put("flow", 1, lambda: seen.append("second"))
        await asyncio.sleep(10)
        assert seen == []
        pipe.release()
        assert seen == ["first", "second"]

    virtual_time.run(main())


def test_pipe_does_not_spend_its_rate_on_dropped_messages() -> None:
    async def main() -> None:
        pipe, seen = make_pipe(LinkModel(bandwidth_bytes_per_s=FRAME_BYTES)), []
        pipe.put("given up", 100 * FRAME_BYTES, lambda: seen.append("never"))
        await asyncio.sleep(1.5)
        pipe.drop("given up")
        pipe.put("next", 1, lambda: seen.append("next"))
        await asyncio.sleep(1)
        assert seen == ["next"]

    virtual_time.run(main())


def test_closed_pipe_loses_messages_in_flight_and_carries_nothing() -> None:
    async def main() -> None:
        pipe, seen = make_pipe(LinkModel(latency_s=1)), []
        pipe.put("flow", 1, lambda: seen.append("under way"))
        await asyncio.sleep(0.5)
        pipe.close()
        pipe.put("flow", 1, lambda: seen.append("later"))
        await asyncio.sleep(2)
        assert seen == []

    virtual_time.run(main())


def test_rate_with_burst_makes_up_for_late_timers() -> None:
    rate = Rate(1000.0, burst_s=0.02)
    rate.reserve(1000, now_s=10.0)
    assert rate.reserve(10, now_s=11.1) == pytest.approx(11.1 - 0.02 + 0.01)
