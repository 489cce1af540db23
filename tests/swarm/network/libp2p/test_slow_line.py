"""A stream that fills a slow line between real daemons leaves room for what else its node sends."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator

import pytest
from support.proxied_pair import Pair, PairRun, pair_runner
from support.wan_proxy import LINKS, MBIT_BYTES, Connection
from swarm.network.interface import Stream

LINE_BYTES_PER_S = 2 * MBIT_BYTES
SLOW = Connection(
    name="slow",
    down_bytes_per_s=LINE_BYTES_PER_S,
    up_bytes_per_s=LINE_BYTES_PER_S,
    latency_s=0.01,
    jitter_s=0.0,
)
FRAME_BYTES = 2**14
SENT_S = 6.0
MOST_S = 1.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairRun]:
    with pair_runner(tmp_path_factory.mktemp("pair")) as run:
        yield run


def test_call_is_answered_soon_while_two_streams_fill_a_slow_line(run: PairRun) -> None:
    async def take(_peer_id: str, stream: Stream) -> None:
        while await stream.receive():
            pass

    async def case(pair: Pair) -> None:
        loop, took_s, num_connections = asyncio.get_running_loop(), list[float](), pair.proxy.num_connections
        pair.may_answer.set()
        await pair.a.serve_stream("take", take)
        pair.proxy.set_connection(SLOW)
        began_s, before = loop.time(), pair.proxy.down.num_bytes

        async def fill() -> None:
            async with pair.b.stream(pair.a.peer_id, "take", timeout_s=30) as stream:
                while loop.time() < began_s + SENT_S:
                    await stream.send(bytes(FRAME_BYTES))
                await stream.send(b"")

        async with asyncio.TaskGroup() as tasks:
            filling = [tasks.create_task(fill()) for _ in range(2)]
            while not all(task.done() for task in filling):
                asked_s = loop.time()
                await pair.b.call(pair.a.peer_id, "wait", b"", timeout_s=30)
                took_s.append(loop.time() - asked_s)
                await asyncio.sleep(0.2)
        carried = pair.proxy.down.num_bytes - before
        pair.proxy.set_connection(LINKS["lan"])
        assert statistics.median(took_s) < MOST_S
        assert carried > 0.8 * SENT_S * LINE_BYTES_PER_S, "the line must be busy"
        assert pair.proxy.num_connections == num_connections

    run(case)
