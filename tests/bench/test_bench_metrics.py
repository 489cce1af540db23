"""What metrics cost a serving node: the hook of each step, and a scrape, against the time of a token.

make bench                                             # or alone:
.venv/bin/python -m pytest tests/bench/test_bench_metrics.py -m bench -s
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from bench.report import Report
from exposed_metrics import whole_registry
from swarm.network.traffic import Traffic
from swarm_node.metrics.of_server import ServerMetrics
from swarm_node.metrics.registry import Registry

pytestmark = pytest.mark.bench

TOKEN_MS = 5.0
"""Of a fast server's share of a token: a GPU's or a small model's. Slower ones lose less."""

SCRAPE_S = 15.0
NUM_ROUNDS = 41
NUM_CALLS = 2000
MAX_SHARE = 0.01


def cpu_us(work: Callable[[], None], num_calls: int) -> float:
    """Processor time of a call, the median of rounds: what else the machine does takes no part."""
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
        """Of one token on one server: its step, and its message in and out, each in a piece."""
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
