"""What `--max-memory` promises: a node that is told a size stays below it, whatever is asked of it.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_serving_memory.py -m bench -s

A real node with the 44M Llama, its cache filled by eight sessions at once and then by one alone, and the most memory
that the kernel ever saw in the hands of its processes, the libp2p daemon included.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from bench.bench_model import MODEL, NUM_BLOCKS, NUM_TOKENS, answer, write_model
from bench.process_memory import children, peak_bytes
from bench.report import Report
from support.serving_fleet import serving_fleet
from swarm.client import AsyncClient
from swarm.serving.model.kv_pool import PAGE_TOKENS

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MIB = 2**20
TOLD_MIB = 1000
NUM_SESSIONS = 8


async def until_free(client: AsyncClient, num_tokens: int) -> None:
    """Wait until the server reports that so many tokens of its cache are free."""
    async with asyncio.timeout(60):
        while any(record.free_kv_tokens < num_tokens for record in (await client.servers(MODEL)).values()):
            await asyncio.sleep(0.2)


def test_node_never_exceeds_its_max_memory(tmp_path: Path) -> None:
    model = write_model(tmp_path / MODEL)
    report = Report(f"a node with a 44M Llama that is told --max-memory {TOLD_MIB}MiB, under load")

    async def main() -> int:
        options = ("--threads", "2", "--max-memory", f"{TOLD_MIB}MiB")
        async with serving_fleet(tmp_path, model, [(0, NUM_BLOCKS)], *options) as servers:
            node = servers.fleet.processes["node-1"].process
            pids = {"node": node.pid, **{f"its child {i}": pid for i, pid in enumerate(children(node.pid))}}
            (record,) = (await servers.client.servers(MODEL)).values()
            start_bytes = {who: peak_bytes(pid) for who, pid in pids.items()}
            shared = record.free_kv_tokens // NUM_SESSIONS - PAGE_TOKENS - NUM_TOKENS
            async with asyncio.TaskGroup() as tasks:
                for index in range(NUM_SESSIONS):
                    tasks.create_task(answer(servers.client, index, num_prompt_tokens=shared))
            await until_free(servers.client, record.free_kv_tokens)
            longest = record.free_kv_tokens - PAGE_TOKENS - NUM_TOKENS
            await answer(servers.client, NUM_SESSIONS, num_prompt_tokens=longest)
            peaks = {who: peak_bytes(pid) for who, pid in pids.items()}
            for who, num_bytes in peaks.items():
                report.row(who, start_MiB=start_bytes[who] / MIB, peak_MiB=num_bytes / MIB)
            report.row(
                "together", peak_MiB=sum(peaks.values()) / MIB, told_MiB=TOLD_MIB, kv_tokens=record.free_kv_tokens
            )
            return sum(peaks.values())

    peak = asyncio.run(main())
    report.show()
    assert peak <= TOLD_MIB * MIB
