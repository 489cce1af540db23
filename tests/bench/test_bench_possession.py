"""What a manifest costs: the first token of a new client and of a known one, and the check of files as they are loaded.

    .venv/bin/python -m pytest tests/bench/test_bench_possession.py -m bench -s

One server on libp2p serves the same weights twice, published and unpublished. Requests alternate between the two.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from bench.report import Report
from support.network_worlds import eventually, libp2p_node
from support.published_models import published_copy
from support.tiny_models import FAMILIES, write_model
from swarm.client import AsyncClient
from swarm.network.membership import Membership
from swarm.serving.manifest.verification import tree_of
from swarm.serving.server.span_server import SpanServer
from swarm_protocol.records import NodeRecord

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

NUM_CLIENTS = 15
FILE_BYTES = 2**29
KINDS = ("plain", "published")


def test_first_token_of_a_published_model_comes_as_soon_as_of_an_unpublished_one(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", FAMILIES["llama"]())
    published_copy(plain, tmp_path / "published", name="published")
    first_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    next_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}

    async def first_token_ms(client: AsyncClient, kind: str) -> float:
        since_s = time.perf_counter()
        generation = client.generate(model=kind, prompt="def f(", max_tokens=2)
        await anext(aiter(generation))
        took_ms = (time.perf_counter() - since_s) * 1000
        await generation.aclose()
        return took_ms

    async def main() -> None:
        async with AsyncExitStack() as stack:
            host = await libp2p_node(tmp_path / "server")
            stack.push_async_callback(host.close)
            serving = await stack.enter_async_context(Membership(host))
            serving.announce(
                NodeRecord(
                    name="box",
                    version="0",
                    addrs=(),
                    device="cpu",
                    memory_bytes=1,
                    free_memory_bytes=1,
                    reachability="public",
                    started_at=0.0,
                    models=KINDS,
                )
            )
            for kind in KINDS:
                server = SpanServer(host, serving, tmp_path / kind, name=kind, start=0, end=6)
                await server.start()
                stack.push_async_callback(server.close)
            network = await libp2p_node(tmp_path / "client", peers=await host.addrs())
            stack.push_async_callback(network.close)
            membership = await stack.enter_async_context(Membership(network))

            async def all_known() -> bool:
                return all([len(await membership.servers(kind)) == 1 for kind in KINDS])

            await eventually(all_known, timeout_s=30)
            num_proven = 0
            for number in range(NUM_CLIENTS + 1):
                for kind in KINDS if number % 2 else KINDS[::-1]:
                    client = AsyncClient(network=network, membership=membership)
                    await client.warm_up()
                    first, following = await first_token_ms(client, kind), await first_token_ms(client, kind)
                    await asyncio.sleep(0.2)
                    num_proven += client.possession.num_proven
                    await client.aclose()
                    if number:  # the first pair warms up the server
                        first_ms[kind].append(first)
                        next_ms[kind].append(following)
            assert num_proven >= NUM_CLIENTS, "each client must have received a proof beside its requests"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    table = Report("First token of a published model")
    for kind in KINDS:
        first, following = statistics.median(first_ms[kind]), statistics.median(next_ms[kind])
        table.row(kind, first_request_ms=first, next_request_ms=following)
    table.show()


def test_files_are_checked_at_the_speed_of_sha256(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(2**20) * (FILE_BYTES // 2**20))
    since_s = time.perf_counter()
    tree_of(path)
    took_s = time.perf_counter() - since_s
    Report("Check of a file as it is loaded").row("sha256", GB_per_s=FILE_BYTES / took_s / 1e9, s=took_s).show()
