"""What a dashboard of 1,000 nodes costs while 50 visitors follow it live: CPU, memory, and whether all hear in time.

make bench                                             # or alone:
.venv/bin/python -m pytest tests/bench/test_bench_dashboard.py -m bench -s
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from bench.report import Report

pytestmark = [pytest.mark.bench, pytest.mark.timeout(400)]

NUM_NODES = 1000
NUM_VISITORS = 50
WARM_S = 15.0
MEASURED_S = 60.0
SERVER = Path(__file__).with_name("dashboard_server.py")


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Start a dashboard and yield its process and its URL."""
    environment = {**os.environ, "PYTHONPATH": str(SERVER.parents[1]), "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), str(NUM_NODES), str(folder / "history.sqlite")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield psutil.Process(process.pid), process.stdout.readline().strip()
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        process.stdout.close()
    assert "Traceback" not in log.read_text()  # overviews that fail cost little


class Visitor:
    """Count the overviews that reach a visitor."""

    def __init__(self) -> None:
        self.num_events = 0
        self.num_bytes = 0

    async def follow(self, client: httpx.AsyncClient, url: str) -> None:
        async with client.stream("GET", f"{url}/api/v1/events", timeout=30) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                self.num_events += line == "event: overview"
                self.num_bytes += len(line)


async def visit(process: psutil.Process, url: str) -> dict[str, float]:
    visitors = [Visitor() for _ in range(NUM_VISITORS)]
    limits = httpx.Limits(max_connections=NUM_VISITORS)
    async with httpx.AsyncClient(limits=limits) as client, asyncio.TaskGroup() as tasks:
        following = [tasks.create_task(visitor.follow(client, url)) for visitor in visitors]
        await asyncio.sleep(WARM_S)
        used, counted = cpu_s(process), [visitor.num_events for visitor in visitors]
        since_bytes = sum(visitor.num_bytes for visitor in visitors)
        await asyncio.sleep(MEASURED_S)
        events = [visitor.num_events - before for visitor, before in zip(visitors, counted, strict=True)]
        memory = process.memory_info()
        figures = {
            "least_events_per_min": min(events) * 60 / MEASURED_S,
            "most_events_per_min": max(events) * 60 / MEASURED_S,
            "cores": (cpu_s(process) - used) / MEASURED_S,
            "rss_MB": memory.rss / 1e6,
            "own_MB": (memory.rss - memory.shared) / 1e6,
            "sent_kB_per_s": (sum(visitor.num_bytes for visitor in visitors) - since_bytes) / MEASURED_S / 1e3,
        }
        for task in following:
            task.cancel()
    return figures


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def test_bench_dashboard(tmp_path: Path) -> None:
    report = Report(f"dashboard: {NUM_NODES} nodes, {NUM_VISITORS} visitors")
    with dashboard(tmp_path) as (process, url):
        report.row("live", **asyncio.run(visit(process, url)))
    report.show()
    live = {name: float(value) for name, value in report.rows["live"].items()}
    assert live["least_events_per_min"] >= 57
    assert live["cores"] < 0.25
    assert live["rss_MB"] < 300
