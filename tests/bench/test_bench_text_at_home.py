"""What it costs to keep text at home: tokens a second, and the client's bytes a token, beside ordinary serving.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_text_at_home.py -m bench -s

A 44M Llama over three servers on loopback, in processes of their own. One client in this process keeps text at home and
the other does not; both take turns, round by round, and figures are medians. On loopback a round trip is nothing: what
a distance costs follows from the hops of a token, which are one more with the client among them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest
from bench.bench_model import MODEL, NUM_TOKENS, answer, use_drafts, write_model
from bench.report import Report
from support.serving_fleet import serving_fleet
from swarm.client import AsyncClient

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

NUM_ROUNDS = 5
BATCH = 8
SPANS = ((0, 4), (4, 8), (8, 12))
HIDDEN_BYTES = 4 * 512
"""The size of one token's hidden states of this model in fp32."""


def _bytes(client: AsyncClient) -> tuple[int, int]:
    traffic = client._network._host.traffic  # type: ignore[attr-defined]
    return traffic.up_bytes, traffic.down_bytes


async def _round(client: AsyncClient, round_: int) -> dict[str, float]:
    before, since = _bytes(client), time.perf_counter()
    await answer(client, 100 * round_)
    one_s, after = time.perf_counter() - since, _bytes(client)
    since = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index in range(BATCH):
            tasks.create_task(answer(client, 100 * round_ + 1 + index))
    batch_s = time.perf_counter() - since
    since = time.perf_counter()
    await answer(client, 100 * round_ + 50, num_prompt_tokens=512, num_tokens=1)
    return {
        "one_tokens_per_s": NUM_TOKENS / one_s,
        "batch_tokens_per_s": BATCH * NUM_TOKENS / batch_s,
        "first_token_512_ms": 1000 * (time.perf_counter() - since),
        # the prompt's 32 rows are also sent once
        "up_bytes_per_token": (after[0] - before[0]) / (NUM_TOKENS + 32),
        "down_bytes_per_token": (after[1] - before[1]) / (NUM_TOKENS + 32),
    }


def test_text_at_home_beside_ordinary_serving(tmp_path: Path) -> None:
    model = write_model(tmp_path / MODEL)
    seen: dict[str, dict[str, list[float]]] = {"ordinary": defaultdict(list), "text at home": defaultdict(list)}

    async def main() -> None:
        async with serving_fleet(tmp_path, model, SPANS, "--threads", "1") as servers:
            peers = servers.state.node("seed").addrs
            async with AsyncClient.connect(peers=peers, text_at_home={MODEL: model}) as at_home:
                clients = {"ordinary": servers.client, "text at home": at_home}
                for client in clients.values():
                    use_drafts(client, drafts=False)
                    await answer(client, 1000, num_tokens=8)
                for round_ in range(NUM_ROUNDS):
                    for name, client in clients.items():
                        for figure, value in (await _round(client, round_)).items():
                            seen[name][figure].append(value)

    asyncio.run(main())
    figures = {who: {name: statistics.median(values) for name, values in rows.items()} for who, rows in seen.items()}
    report = Report(f"text at home: a 44M Llama over {len(SPANS)} servers on loopback (medians of {NUM_ROUNDS} rounds)")
    for who, row in figures.items():
        report.row(who, **row)
    ratio = {name: value / figures["ordinary"][name] for name, value in figures["text at home"].items()}
    report.row("ratio", **ratio).show()
    # a token's hidden states are sent once; those of each server come back as usual, and here also the last one's
    assert HIDDEN_BYTES <= figures["text at home"]["up_bytes_per_token"] <= 1.2 * HIDDEN_BYTES
    assert (
        figures["text at home"]["down_bytes_per_token"]
        <= figures["ordinary"]["down_bytes_per_token"] + 1.2 * HIDDEN_BYTES
    )
    assert ratio["one_tokens_per_s"] >= 0.5
