"""Ten thousand nodes of which half leave within an hour, and as many join, and a thousand of them train one run.

What a node holds, sends and finds, whether all trainers are in work, and how long the simulation takes. A tenth of the
network, with which it is compared, is simulated before.

make bench                                             # or alone, for fewer minutes or nodes:
SIMULATED_MINUTES=10 .venv/bin/python -m pytest tests/bench/test_bench_simulation.py -m bench -s
"""

from __future__ import annotations

import os
import resource
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.network_promises import broken_promises
from bench.report import Report, aim
from swarm.simulation.report import IN_WORK, UTILIZATION
from swarm.simulation.scenario import Scenario, read_scenario
from swarm.simulation.world import simulate

pytestmark = pytest.mark.bench

SCENARIO = read_scenario(tomllib.loads((Path(__file__).parent / "ten_thousand_nodes.toml").read_text()))
NUM_NODES = int(os.environ.get("SIMULATED_NODES", SCENARIO.nodes))
MINUTES = float(os.environ.get("SIMULATED_MINUTES", SCENARIO.minutes))
MAX_HOUR_S = 1800.0
"""The aim for the whole scenario."""

MIN_COMPARED = 5000
"""Nodes from which on the promises are checked. In a tenth of fewer every node is near every key, and a run has a
handful of trainers: what a node holds and sends there says nothing of a network in which it knows few others."""


def tenth_of(scenario: Scenario) -> Scenario:
    """Return the same network with a tenth of the nodes, places and lookups, for the minutes in which its tables
    fill."""
    assert scenario.training is not None
    training = replace(scenario.training, cluster_size=max(1, scenario.training.cluster_size // 10))
    nodes, probes, minutes = scenario.nodes // 10, scenario.probes_per_minute / 10, min(15.0, scenario.minutes)
    return replace(scenario, nodes=nodes, probes_per_minute=probes, minutes=minutes, training=training)


@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_nodes_of_which_half_leave_in_an_hour_and_a_thousand_train() -> None:
    scenario = replace(SCENARIO, nodes=NUM_NODES, minutes=MINUTES)
    few = simulate(tenth_of(scenario)) if NUM_NODES >= MIN_COMPARED else None
    began_s, since = time.process_time(), time.monotonic()

    def on_minute(minute: float, num_nodes: int) -> None:
        cpu_s, wall_s = time.process_time() - began_s, time.monotonic() - since
        print(f"minute {minute:.0f}: {num_nodes} nodes, {wall_s:.0f} s, {cpu_s:.0f} s of one processor", flush=True)

    found = simulate(scenario, on_minute=on_minute)
    took_s, cpu_s = time.monotonic() - since, time.process_time() - began_s
    lookups: dict[str, Any] = dict(found.sections["Lookups"])
    state: dict[str, Any] = dict(found.sections["A node's state and traffic"])
    training: dict[str, Any] = dict(found.sections["Training"])
    print("\n".join(found.lines()), flush=True)
    print("\n".join(map(str, found.samples)), flush=True)
    report = Report(f"{NUM_NODES} simulated nodes for {MINUTES:g} minutes")
    report.row(
        "all",
        lookups_found=lookups["share that found the record"],
        most_hops=lookups["hops"]["max"],
        records=state["records held, mean"],
        peers=state["routing table, mean"],
        messages_per_min=state["messages sent a minute"]["median"],
        in_work=training[IN_WORK]["median"],
        utilization=training[UTILIZATION],
        took_s=took_s,
        cpu_s=cpu_s,
        gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    report.show()
    if few is None:
        pytest.skip(f"simulated, but not compared: a tenth of {NUM_NODES} nodes is a network of another kind")
    assert broken_promises(found, few) == []
    if (SCENARIO.nodes, SCENARIO.minutes) == (NUM_NODES, MINUTES):
        aim(hour_in_half_an_hour=took_s <= MAX_HOUR_S)
