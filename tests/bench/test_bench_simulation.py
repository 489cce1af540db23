"""Ten thousand nodes of which half leave within an hour, and as many join: what a node holds, sends and finds; and a
thousand trainers, of which half leave, too: whether all are in work.

make bench                                             # or alone, for fewer minutes or nodes:
SIMULATED_MINUTES=10 .venv/bin/python -m pytest tests/bench/test_bench_simulation.py -m bench -s
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest
from bench.report import Report
from swarm.simulation.report import UTILIZATION
from swarm.simulation.scenario import Churn, Nat, NodeClass, Path, Region, Scenario, Training
from swarm.simulation.world import simulate

pytestmark = pytest.mark.bench

NUM_NODES = int(os.environ.get("SIMULATED_NODES", "10000"))
MINUTES = float(os.environ.get("SIMULATED_MINUTES", "60"))
NUM_TRAINERS = int(os.environ.get("SIMULATED_TRAINERS", "1000"))
HALF_LEAVE = Churn(model="half-life", half_life_minutes=60)


@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_nodes_of_which_half_leave_in_an_hour() -> None:
    scenario = Scenario(
        nodes=NUM_NODES,
        minutes=MINUTES,
        warm_up_minutes=6,
        probes_per_minute=120,
        churn=HALF_LEAVE,
        regions=(
            Region(name="eu", share=0.5, latency_ms=15),
            Region(name="us", share=0.3),
            Region(name="asia", share=0.2, latency_ms=30),
        ),
        paths=(
            Path(between=("eu", "us"), latency_ms=45),
            Path(between=("eu", "asia"), latency_ms=110),
            Path(between=("us", "asia"), latency_ms=80),
        ),
        nats=(Nat(share=0.3), Nat(kind="punched", share=0.5), Nat(kind="relayed", share=0.2)),
    )
    since = time.process_time()
    found = simulate(scenario)
    cpu_s = time.process_time() - since
    lookups: dict[str, Any] = dict(found.sections["Lookups"])
    state: dict[str, Any] = dict(found.sections["A node's state and traffic"])
    report = Report(f"{NUM_NODES} simulated nodes for {MINUTES:g} minutes")
    report.row(
        "a node",
        lookups_found=lookups["share that found the record"],
        most_hops=lookups["hops"]["max"],
        records=state["records held, mean"],
        peers=state["routing table, mean"],
        messages_per_min=state["messages sent a minute"]["median"],
        cpu_s=cpu_s,
    )
    report.show()
    assert lookups["share that found the record"] >= 0.999
    assert lookups["hops"]["max"] <= math.log2(NUM_NODES)


@pytest.mark.timeout(4 * 3600)
def test_thousand_trainers_of_which_half_leave_in_an_hour_are_all_in_work() -> None:
    scenario = Scenario(
        nodes=NUM_TRAINERS,
        minutes=MINUTES / 2,
        warm_up_minutes=5,
        probes_per_minute=0,
        churn=HALF_LEAVE,
        training=Training(members=16, million_parameters=20, interval_minutes=3),
        classes=(NodeClass(name="trainers", role="train", up_mbit=50),),
    )
    since = time.process_time()
    found = simulate(scenario)
    cpu_s = time.process_time() - since
    training: dict[str, Any] = dict(found.sections["Training"])
    state: dict[str, Any] = dict(found.sections["A node's state and traffic"])
    report = Report(f"{NUM_TRAINERS} simulated trainers for {scenario.minutes:g} minutes")
    report.row(
        "a trainer",
        share_in_work=training["share of the trainers that are in work"]["median"],
        utilization=training[UTILIZATION],
        messages_per_min=state["messages sent a minute"]["median"],
        kilobytes_per_min=state["bytes sent a minute"]["median"] / 1e3,
        cpu_s=cpu_s,
    )
    report.show()
    assert training["share of the trainers that are in work"]["median"] >= 0.95
