"""Greedy tokens through three servers beside `transformers.generate`, for every family; and what a token's cache takes.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_exactness.py -m bench -s

Servers and client of this process on libp2p hosts of their own. Prompts are of 16 lengths, asked alone and all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bench.local_transformers import prompt_ids
from bench.report import Report
from support.network_worlds import libp2p_node
from support.tiny_models import FAMILIES, local_tokens, write_model
from swarm.client import AsyncClient
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.serving.model.kv_pool import PAGE_TOKENS, KVPool, KVShape
from swarm.serving.server.deployment import ServerOptions
from swarm.serving.server.span_server import SpanServer

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

SPANS = ((0, 2), (2, 4), (4, 6))
LENGTHS = (1, 2, 5, 9, 15, 16, 17, 24, 31, 32, 33, 48, 64, 90, 128, 200)
NUM_TOKENS = 24
KV_BYTES = 16 * 2**20
NUM_POOL_BYTES = 256 * 2**20


def theory_bytes(config: Any, num_blocks: int) -> int:
    """Return the bytes of one token's keys and values in fp32."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * num_kv_heads * head_size * 4 * num_blocks)


async def answer(client: AsyncClient, family: str, prompt: Sequence[int]) -> list[int]:
    return [token.token_id async for token in client.generate(model=family, prompt=prompt, max_tokens=NUM_TOKENS)]


async def compare(client: AsyncClient, family: str, directory: Path) -> dict[str, Any]:
    """Return whether the tokens equal those of one machine, up to where an answer ended."""
    prompts = [prompt_ids(index, length) for index, length in enumerate(LENGTHS)]
    expected = [local_tokens(directory, prompt, NUM_TOKENS) for prompt in prompts]
    alone = [await answer(client, family, prompt) for prompt in prompts]
    batch = await asyncio.gather(*(answer(client, family, prompt) for prompt in reversed(prompts)))
    num_tokens = sum(map(len, alone))
    return {"alone": _agree(alone, expected), "batch_of_16": _agree(batch[::-1], expected), "tokens_each": num_tokens}


def _agree(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """Return whether the tokens agree. An answer ends with its end token, while transformers is told to go beyond
    it."""
    pairs = zip(found, expected, strict=True)
    return "equal" if all(len(ours) > 0 and list(ours) == list(theirs)[: len(ours)] for ours, theirs in pairs) else "no"


def test_greedy_tokens_of_every_family_equal_those_of_transformers(tmp_path: Path) -> None:
    report = Report(f"greedy tokens through {len(SPANS)} servers over libp2p, {len(LENGTHS)} prompts of mixed lengths")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            seed = await libp2p_node(tmp_path / "seed")
            stack.push_async_callback(seed.close)
            hosts: list[tuple[Network, Membership]] = []
            for index in range(len(SPANS)):
                network = await libp2p_node(tmp_path / f"s{index}", peers=await seed.addrs())
                stack.push_async_callback(network.close)
                membership = await stack.enter_async_context(Membership(network))
                hosts.append((network, membership))
            client = await stack.enter_async_context(
                AsyncClient.connect(peers=await seed.addrs(), network_id=seed.network_id)
            )
            for family, config in FAMILIES.items():
                report.row(family, **await serve_and_compare(client, hosts, family, config()))

    async def serve_and_compare(
        client: AsyncClient, hosts: Sequence[tuple[Network, Membership]], family: str, config: Any
    ) -> dict[str, Any]:
        directory = write_model(tmp_path / family, config)
        options = ServerOptions(kv_bytes=KV_BYTES)
        async with AsyncExitStack() as stack:
            taken = 0
            for (network, membership), (start, end) in zip(hosts, SPANS, strict=True):
                server = SpanServer(network, membership, directory, name=family, start=start, end=end, options=options)
                await server.start()
                stack.push_async_callback(server.close)
                taken += KV_BYTES // server.record.free_kv_tokens
            async with asyncio.timeout(30):
                while len(await client.servers(family)) < len(SPANS):
                    await asyncio.sleep(0.05)
            rows = await compare(client, family, directory)
        theory = theory_bytes(config, SPANS[-1][1])
        return {**rows, "kv_bytes_per_token": taken, "in_theory": theory, "ratio": taken / theory}

    asyncio.run(main())
    report.show()
    for family, row in report.rows.items():
        assert (row["alone"], row["batch_of_16"]) == ("equal", "equal"), family
        assert row["tokens_each"] > len(LENGTHS) * NUM_TOKENS / 2, (
            family
        )  # only few answers were cut short by an end token
        assert row["ratio"] == pytest.approx(1, abs=0.05), family


def test_pool_of_keys_and_values_takes_the_memory_that_theory_predicts() -> None:
    shape = KVShape(num_heads=8, key_width=64, value_width=64)
    num_blocks, theory = 12, 2 * 8 * 64 * 4 * 12
    num_pages = NUM_POOL_BYTES // (theory * PAGE_TOKENS)
    process = psutil.Process()
    before = process.memory_info().rss
    pool = KVPool([shape] * num_blocks, num_pages, torch.float32, "cpu")
    made = process.memory_info().rss
    for tensor in (*pool.keys_SKD, *pool.values_SKD):
        tensor.fill_(1.0)
    bytes_per_token = (process.memory_info().rss - before) / (num_pages * PAGE_TOKENS)
    report = Report("memory of the cache of a 44M Llama, as the system counts it")
    report.row("in theory", bytes_per_token=theory)
    report.row("filled", bytes_per_token=bytes_per_token, ratio=bytes_per_token / theory)
    report.row("not yet used", bytes_per_token=(made - before) / (num_pages * PAGE_TOKENS))
    report.show()
    assert bytes_per_token == pytest.approx(theory, rel=0.05)
