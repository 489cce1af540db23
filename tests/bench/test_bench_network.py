"""Start, records, round trips and throughput: our network, hivemind's plain P2P and DHT, and plain asyncio TCP.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_network.py -m bench -s

All run side by side in one process with both ends in it, interleaved round by round; figures are medians of the rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from bench.report import Report
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PContext
from hivemind.proto import runtime_pb2
from support.network_worlds import libp2p_node
from swarm.network.interface import EndOfStream, Stream
from swarm.network.libp2p_network import Libp2pNetwork
from swarm_protocol.identity import Identity

pytestmark = pytest.mark.bench

NUM_ROUNDS = 7
NUM_CALLS = 200
MESSAGE_BYTES = 2**20
NUM_MESSAGES = 100
SMALL = bytes(100)
PREFIX_BYTES = 8

Measure = Callable[[], Awaitable[dict[str, float]]]


class Stopwatch:
    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start


def rate(watch: Stopwatch) -> float:
    return NUM_MESSAGES * MESSAGE_BYTES / watch.seconds / 1e6


@contextlib.asynccontextmanager
async def ours(folder: Path) -> AsyncIterator[Measure]:
    async def echo(_peer_id: str, request: bytes) -> bytes:
        return request

    async def pour(_peer_id: str, stream: Stream) -> None:
        message = bytes(MESSAGE_BYTES)
        for _ in range(NUM_MESSAGES):
            await stream.send(message)

    seed = await libp2p_node(folder / "seed")
    peers = await seed.addrs()
    await seed.serve("echo", echo)
    await seed.serve_stream("pour", pour)

    async def measure() -> dict[str, float]:
        with Stopwatch() as ready:
            node = await libp2p_node(folder / "node", peers=peers)
        async with node:
            with Stopwatch() as store:
                for index in range(20):
                    assert await node.publish(f"k{index}", SMALL, lifetime_s=60)
            with Stopwatch() as get:
                for index in range(20):
                    assert await node.lookup([f"k{index}"], timeout_s=5)
            with Stopwatch() as calls:
                for _ in range(NUM_CALLS):
                    await node.call(seed.peer_id, "echo", SMALL, timeout_s=10)
            with Stopwatch() as poured:
                async with node.stream(seed.peer_id, "pour", timeout_s=30) as stream:
                    with contextlib.suppress(EndOfStream):
                        while True:
                            assert len(await stream.receive()) == MESSAGE_BYTES
        return figures(ready, store, get, calls, poured)

    yield measure
    await seed.close()


@contextlib.asynccontextmanager
async def plain_hivemind(_folder: Path) -> AsyncIterator[Measure]:
    async def echo(request: runtime_pb2.Tensor, _context: P2PContext) -> runtime_pb2.Tensor:
        return request

    async def pour(_request: runtime_pb2.Tensor, _context: P2PContext) -> AsyncIterator[runtime_pb2.Tensor]:
        message = runtime_pb2.Tensor(buffer=bytes(MESSAGE_BYTES))
        for _ in range(NUM_MESSAGES):
            yield message

    seed = await P2P.create(nat_port_map=False)
    peers = await seed.get_visible_maddrs()
    seed_dht = await DHTNode.create(p2p=seed)
    await seed.add_protobuf_handler("echo", echo, runtime_pb2.Tensor)
    await seed.add_protobuf_handler("pour", pour, runtime_pb2.Tensor, stream_output=True)

    async def measure() -> dict[str, float]:
        with Stopwatch() as ready:
            node = await P2P.create(initial_peers=peers, nat_port_map=False)
            dht = await DHTNode.create(p2p=node, initial_peers=peers, cache_locally=False)
        end = time.time() + 60
        with Stopwatch() as store:
            for index in range(20):
                assert await dht.store(f"k{index}", SMALL, end, subkey=str(node.peer_id))
        with Stopwatch() as get:
            for index in range(20):
                assert await dht.get(f"k{index}", latest=True)
        request = runtime_pb2.Tensor(buffer=SMALL)
        with Stopwatch() as calls:
            for _ in range(NUM_CALLS):
                await node.call_protobuf_handler(seed.peer_id, "echo", request, runtime_pb2.Tensor)
        with Stopwatch() as poured:
            async for message in await node.iterate_protobuf_handler(seed.peer_id, "pour", request, runtime_pb2.Tensor):
                assert len(message.buffer) == MESSAGE_BYTES
        await dht.shutdown()
        await node.shutdown()
        return figures(ready, store, get, calls, poured)

    yield measure
    await seed_dht.shutdown()
    await seed.shutdown()


@contextlib.asynccontextmanager
async def plain_tcp(_folder: Path) -> AsyncIterator[Measure]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                request = await read(reader)
                if request == b"pour":
                    for _ in range(NUM_MESSAGES):
                        await write(writer, bytes(MESSAGE_BYTES))
                else:
                    await write(writer, request)
        writer.close()

    async def read(reader: asyncio.StreamReader) -> bytes:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(PREFIX_BYTES), "big"))

    async def write(writer: asyncio.StreamWriter, message: bytes) -> None:
        writer.write(len(message).to_bytes(PREFIX_BYTES, "big"))
        writer.write(message)
        await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=MESSAGE_BYTES)

    async def measure() -> dict[str, float]:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=MESSAGE_BYTES)
        with Stopwatch() as calls:
            for _ in range(NUM_CALLS):
                await write(writer, SMALL)
                await read(reader)
        with Stopwatch() as poured:
            await write(writer, b"pour")
            for _ in range(NUM_MESSAGES):
                await read(reader)
        writer.close()
        return {"unary_ms": calls.seconds / NUM_CALLS * 1e3, "stream_MB_per_s": rate(poured)}

    yield measure
    server.close()


def figures(
    ready: Stopwatch, store: Stopwatch, get: Stopwatch, calls: Stopwatch, poured: Stopwatch
) -> dict[str, float]:
    return {
        "ready_s": ready.seconds,
        "store_ms": store.seconds / 20 * 1e3,
        "get_ms": get.seconds / 20 * 1e3,
        "unary_ms": calls.seconds / NUM_CALLS * 1e3,
        "stream_MB_per_s": rate(poured),
    }


async def compare(folder: Path) -> dict[str, dict[str, float]]:
    """Return the medians by contender."""
    contenders = {"Libp2pNetwork": ours, "hivemind P2P": plain_hivemind, "asyncio TCP": plain_tcp}
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    async with contextlib.AsyncExitStack() as stack:
        measures = {name: await stack.enter_async_context(open_(folder)) for name, open_ in contenders.items()}
        for _ in range(NUM_ROUNDS):
            for name, measure in measures.items():
                for column, value in (await measure()).items():
                    samples[name][column].append(value)
    return {
        name: {column: statistics.median(values) for column, values in columns.items()}
        for name, columns in samples.items()
    }


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # warnings of hivemind
def test_bench_network_beside_plain_hivemind_and_tcp(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        medians = runner.run(compare(tmp_path))
    report = Report("network, both ends in one process")
    for name, columns in medians.items():
        report.row(name, **columns)
    report.show()
    own, plain = medians["Libp2pNetwork"], medians["hivemind P2P"]
    assert own["ready_s"] < 3
    assert own["unary_ms"] < plain["unary_ms"] * 1.1
    assert own["stream_MB_per_s"] > plain["stream_MB_per_s"] * 0.9


@contextlib.asynccontextmanager
async def echo_and_sink(node: Libp2pNetwork) -> AsyncIterator[Libp2pNetwork]:
    async def echo(_peer_id: str, request: bytes) -> bytes:
        return request

    async def take(_peer_id: str, stream: Stream) -> None:
        for _ in range(NUM_MESSAGES):
            await stream.receive()
        await stream.send(b"all here")

    async with node:
        await node.serve("echo", echo)
        await node.serve_stream("take", take)
        yield node


async def measure_peer(caller: Libp2pNetwork, peer_id: str) -> dict[str, float]:
    with Stopwatch() as calls:
        for _ in range(NUM_CALLS):
            await caller.call(peer_id, "echo", SMALL, timeout_s=10)
    with Stopwatch() as poured:
        async with caller.stream(peer_id, "take", timeout_s=30) as stream:
            for _ in range(NUM_MESSAGES):
                await stream.send(bytes(MESSAGE_BYTES))
            assert await stream.receive() == b"all here"
    return {"unary_ms": calls.seconds / NUM_CALLS * 1e3, "stream_MB_per_s": rate(poured)}


@pytest.mark.timeout(120)
def test_bench_peer_behind_a_relay_beside_a_direct_one(tmp_path: Path) -> None:
    async def main() -> dict[str, dict[str, list[float]]]:
        samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        async with contextlib.AsyncExitStack() as stack:
            relay = await stack.enter_async_context(await libp2p_node(tmp_path / "relay", relay="serve"))
            peers = await relay.addrs()
            hidden = await libp2p_node(tmp_path / "hidden", peers=peers, listen=(), relay="use")
            callees = {
                "through a relay": await stack.enter_async_context(echo_and_sink(hidden)),
                "direct": await stack.enter_async_context(
                    echo_and_sink(await libp2p_node(tmp_path / "direct", peers=peers))
                ),
            }
            caller = await stack.enter_async_context(await libp2p_node(tmp_path / "caller", peers=peers, listen=()))
            for _ in range(NUM_ROUNDS):
                for name, callee in callees.items():
                    for column, value in (await measure_peer(caller, callee.peer_id)).items():
                        samples[name][column].append(value)
            assert relay.relay_counts.relayed_bytes > NUM_ROUNDS * NUM_MESSAGES * MESSAGE_BYTES
        return samples

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        samples = runner.run(main())
    report = Report("a peer behind a relay, all three in one process")
    for name, columns in samples.items():
        report.row(name, **{column: statistics.median(values) for column, values in columns.items()})
    report.show()
    assert report.rows["through a relay"]["stream_MB_per_s"] > 10


IDLE = """
    import asyncio, json, sys
    from pathlib import Path
    import psutil, torch, uvloop
    from swarm.network.libp2p_network import Libp2pNetwork, Libp2pOptions

    async def main(identity, *peers):
        options = Libp2pOptions(identity_path=Path(identity), network_id="test", peers=peers)
        async with await Libp2pNetwork.create(options) as node:
            processes = [psutil.Process(), *psutil.Process().children()]
            await asyncio.sleep(2)  # let the work of the start end
            before = [sum(process.cpu_times()[:2]) for process in processes]
            await asyncio.sleep(10)
            after = [sum(process.cpu_times()[:2]) for process in processes]
            names = ["python", "p2pd"]
            print(json.dumps({
                **{f"{name}_cpu_%": 10 * (b - a) for name, a, b in zip(names, before, after)},
                **{f"{name}_rss_MB": process.memory_info().rss / 1e6 for name, process in zip(names, processes)},
            }))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
"""


@pytest.mark.timeout(60)
def test_bench_idle_host(tmp_path: Path) -> None:
    async def main() -> dict[str, Any]:
        async with await libp2p_node(tmp_path / "seed") as seed:
            Identity.load_or_create(tmp_path / "idle")
            idle = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", textwrap.dedent(IDLE), str(tmp_path / "idle"), *await seed.addrs()),
                stdout=subprocess.PIPE,
            )
            output, _ = await idle.communicate()
            return dict(json.loads(output))

    measured = asyncio.run(main())
    cpu = measured["python_cpu_%"] + measured["p2pd_cpu_%"]
    rss = measured["python_rss_MB"] + measured["p2pd_rss_MB"]
    Report("idle host, torch loaded, over 10 s").row("Libp2pNetwork", **measured, cpu_percent=cpu, rss_MB=rss).show()
    assert cpu < 1
    assert rss < 450


@pytest.mark.timeout(60)
def test_bench_idle_seed(tmp_path: Path) -> None:
    """Start the command without any peer, as an operator does."""
    command = [sys.executable, "-m", "swarm_node", "seed", "--home", str(tmp_path / "home"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as seed:
        assert seed.stdout is not None
        try:
            events = map(json.loads, seed.stdout)
            assert any(event.get("number", 0) == event.get("of") for event in events), "the seed did not start"
            processes = [psutil.Process(seed.pid), *psutil.Process(seed.pid).children()]
            time.sleep(2)  # let the work of the start end
            before = [sum(process.cpu_times()[:2]) for process in processes]
            time.sleep(10)
            after = [sum(process.cpu_times()[:2]) for process in processes]
            rss = [process.memory_info().rss / 1e6 for process in processes]
        finally:
            seed.terminate()
    cpu = [10 * (b - a) for a, b in zip(before, after, strict=True)]
    report = Report("idle seed, over 10 s")
    for name, cpu_percent, rss_MB in zip(("python", "p2pd"), cpu, rss, strict=True):
        report.row(name, cpu_percent=cpu_percent, rss_MB=rss_MB)
    report.row("together", cpu_percent=sum(cpu), rss_MB=sum(rss)).show()
    assert sum(cpu) < 1
    assert sum(rss) < 200
