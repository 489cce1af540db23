"""What metrics cost a serving node: the hook of each step, and a scrape, against the time of a token.

make bench                                             # or alone:
.venv/bin/python -m pytest tests/bench/test_bench_metrics.py -m bench -s
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from bench.bench_model import NUM_BLOCKS, write_model
from bench.report import Report
from support.exposed_metrics import whole_registry
from swarm.network.traffic import Traffic
from swarm.serving.engine.engine import Engine
from swarm.serving.engine.sequence import EngineSequence
from swarm.serving.model.batch import Want
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.sampling.sampling import Pick
from swarm.serving.server.deployment import ServerOptions
from swarm_node.metrics.metric_registry import Registry
from swarm_node.metrics.readings import ServerMetrics
from swarm_protocol.session_frames import TokenDraw

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

TOKEN_MS = 5.0
"""A fast server's time for a token, as with a GPU or a small model. Slower servers lose a smaller share."""

SCRAPE_S = 15.0
NUM_ROUNDS = 41
NUM_CALLS = 2000
MAX_SHARE = 0.01

NUM_PAIRS = 1000
NUM_WARM_PAIRS = 50


def cpu_us(work: Callable[[], None], num_calls: int) -> float:
    """Return the processor time of a call, as the median of rounds. Other work on the machine does not count."""
    times = []
    for _ in range(NUM_ROUNDS):
        since = time.thread_time()
        for _ in range(num_calls):
            work()
        times.append((time.thread_time() - since) / num_calls * 1e6)
    return statistics.median(times)


def test_metrics_cost_a_token_less_than_a_hundredth() -> None:
    server, traffic = ServerMetrics(Registry()), Traffic()

    def count() -> None:
        """Count one token on one server: its step, and its message in and out, each in a piece."""
        server.step(1, 4.2, 0.3)
        traffic.received("peer", 4096)
        traffic.sent("peer", 4096)

    step_us = cpu_us(count, NUM_CALLS)
    with whole_registry() as registry:
        scrape_us = cpu_us(lambda: registry.exposition() and None, 5)
    share = step_us / (TOKEN_MS * 1e3) + scrape_us / (SCRAPE_S * 1e6)
    report = Report("metrics on a serving node")
    report.row("all of them", token_us=step_us, scrape_ms=scrape_us / 1e3, share_percent=100 * share)
    report.show()
    assert share < MAX_SHARE


@asynccontextmanager
async def seated(span: Span, options: ServerOptions) -> AsyncIterator[EngineSequence]:
    """Yield one session of a server's engine."""
    num_tokens = NUM_WARM_PAIRS + NUM_PAIRS
    engine = Engine(span, span.new_pool(num_tokens // 8 + 1), options, revision="r")
    running = asyncio.create_task(engine.run())
    try:
        yield engine.open(client="c", start=0, end=NUM_BLOCKS, max_tokens=num_tokens)
    finally:
        running.cancel()
        await asyncio.wait({running})
        engine.close()


async def token_s(sequence: EngineSequence) -> float:
    """Return the processor time of one more token, over all threads."""
    since = time.process_time()
    await sequence.step(torch.tensor([5]), Want.NOTHING, Pick(TokenDraw()))
    return time.process_time() - since


async def paired_ratios(span: Span) -> list[float]:
    """Return the ratios of counted to uncounted neighbouring tokens. Which of the two comes first alternates."""
    registry, traffic = Registry(), Traffic()
    server = ServerMetrics(registry)

    def count(num_positions: int, compute_ms: float, queue_ms: float) -> None:
        server.step(num_positions, compute_ms, queue_ms)
        traffic.received("peer", 4096)
        traffic.sent("peer", 4096)

    ratios = []
    async with seated(span, ServerOptions()) as plain, seated(span, ServerOptions(on_step=count)) as counted:
        for number in range(NUM_WARM_PAIRS + NUM_PAIRS):
            both = (plain, counted) if number % 2 else (counted, plain)
            spent_s = {sequence: await token_s(sequence) for sequence in both}
            ratios.append(spent_s[counted] / spent_s[plain])
    assert b"swarm_server_generation_tokens_total" in registry.exposition()
    return ratios[NUM_WARM_PAIRS:]


def test_real_steps_with_metrics_cost_a_hundredth_more_at_most(tmp_path: Path) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios = asyncio.run(paired_ratios(load_span(open_model(write_model(tmp_path)), 0, NUM_BLOCKS)))
    finally:
        torch.set_num_threads(num_threads)
    with whole_registry() as registry:
        scraping = cpu_us(lambda: registry.exposition() and None, 5) / (SCRAPE_S * 1e6)
    added = statistics.median(ratios) - 1 + scraping
    report = Report("metrics on a serving node: real tokens, counted and scraped, against plain ones")
    report.row("44M Llama", added_percent=100 * added, of_it_scraping_percent=100 * scraping)
    report.show()
    assert added < MAX_SHARE
