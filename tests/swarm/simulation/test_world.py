"""Tests of small simulated networks, from their beginning to their reports."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from swarm.serving.server import span_placer
from swarm.simulation import simulated_serving, simulated_training, world
from swarm.simulation.report import IN_WORK, Report
from swarm.simulation.scenario import Churn, Model, Nat, NodeClass, Scenario, Training
from swarm.simulation.world import simulate
from swarm_protocol import limits
from swarm_protocol.dht_messages import FindResponse, Found
from swarm_protocol.records import ServeRecord

SERVING = Scenario(
    nodes=20,
    minutes=2,
    warm_up_minutes=2,
    churn=Churn(model="half-life", half_life_minutes=4),
    nats=(Nat(share=0.5), Nat(kind="relayed", share=0.5)),
    model=Model(blocks=4, block_mib=100),
    classes=(
        NodeClass(name="servers", role="serve", share=0.4, memory_gib=0.4),
        NodeClass(name="gateways", role="gateway", share=0.1),
        NodeClass(name="others", share=0.5),
    ),
)


@cache
def served() -> Report:
    return simulate(SERVING)


def figures(report: Report, section: str) -> dict[str, Any]:
    return dict(report.sections[section])


def test_nodes_come_and_go_and_records_of_the_living_are_found() -> None:
    report = served()
    nodes, lookups = figures(report, "Nodes"), figures(report, "Lookups")
    assert nodes["left"] > 2
    assert nodes["joined"] > 2
    assert lookups["lookups"] > 50
    assert lookups["share that found the record"] > 0.9
    assert 1 <= lookups["hops"]["max"] <= 5
    state = figures(report, "A node's state and traffic")
    assert state["messages sent a minute"]["min"] > 0


def test_servers_take_the_blocks_and_gateways_get_answers() -> None:
    serving = figures(served(), "Serving")
    assert serving["servers at the end"] > 0
    assert serving["blocks without a server"]["min"] == 0
    assert serving["share answered"] > 0.5
    assert 80 < serving["requests"] < 160, "60 a minute, however many gateways share them"
    assert serving["tokens/s of all answers"] > 0


def test_equal_seeds_give_equal_reports_also_where_messages_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_for: list[type] = []

    def parsing(types: Collection[type]) -> AbstractContextManager[None]:
        asked_for.extend(types)
        return nullcontext()

    report = served()
    monkeypatch.setattr(world, "handing_over", parsing)
    monkeypatch.setattr(world, "unchecked", parsing)
    assert simulate(SERVING).to_json() == report.to_json()
    assert {FindResponse, ServeRecord, Found} <= {*asked_for}


def test_other_seeds_give_other_reports() -> None:
    small = replace(SERVING, nodes=4, minutes=1)
    assert simulate(replace(small, seed=1)).to_json() != simulate(small).to_json()


def test_report_is_json_and_one_page_that_loads_nothing() -> None:
    assert json.loads(served().to_json())["sections"].keys() == served().sections.keys()
    page = served().to_html()
    assert "<polyline" in page
    assert "http" not in page
    assert "<script" not in page


def test_memory_is_put_into_huge_pages_only_once_the_simulation_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    held, compacted = [2**30], []
    monkeypatch.setattr(world.heap, "resident_bytes", lambda: held[0])
    monkeypatch.setattr(world.heap, "use_huge_pages", lambda: compacted.append(held[0]))
    small = replace(SERVING, nodes=4, minutes=1)
    simulate(small)
    assert compacted == []

    def grow(minute: float, _num_nodes: int) -> None:
        held[0] = 2**30 + (2**28 if minute > 1 else 0)

    simulate(small, on_minute=grow)
    assert compacted == [2**30 + 2**28]


def test_records_beyond_a_full_key_are_found_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RECORDS_PER_KEY", 4)
    report = simulate(Scenario(nodes=24, minutes=2, warm_up_minutes=3))
    assert figures(report, "Lookups")["records of living nodes not found"] == 0
    assert figures(report, "A node's state and traffic")["records held, most"] < 27


def test_trace_decides_when_nodes_join_and_leave() -> None:
    sessions = ((0.0, 30.0), *((0.0, 999.0) for _ in range(6)), (45.0, 999.0))
    churn = Churn(model="trace", trace="here", goodbye=0)
    report = simulate(Scenario(nodes=8, minutes=2, warm_up_minutes=3, churn=churn, sessions=sessions))
    assert figures(report, "Nodes") == {"nodes at the end": 7 + 3, "joined": 1, "left": 1}  # three are seeds


def test_trainers_form_a_group_and_commit_rounds() -> None:
    report = simulate(
        Scenario(
            nodes=4,
            minutes=4,
            warm_up_minutes=2,
            probes_per_minute=0,
            training=Training(members=4, million_parameters=1, interval_minutes=0.5),
            classes=(NodeClass(role="train"),),
        )
    )
    training = figures(report, "Training")
    assert training["rounds committed"] >= 3
    assert training[IN_WORK]["min"] == 1
    assert training["utilization (share of their time in intervals)"] > 0.5
    assert training["tokens/s committed"] > 0
    # four heads of full clusters of eight: a megabyte comes from each and goes to each, twice a minute at most
    most = 2 * 8 * 120
    assert 0.8 * most < training["megabytes of vectors that a trainer carries in an hour"] <= most


def test_trainers_draw_nothing_from_the_systems_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    for name in ("random", "getrandbits"):
        draw = getattr(random.SystemRandom, name)
        monkeypatch.setattr(random.SystemRandom, name, lambda *args, draw=draw: drawn.append("") or draw(*args))
    report = simulate(
        Scenario(
            nodes=4,
            minutes=1,
            warm_up_minutes=2,
            probes_per_minute=0,
            training=Training(members=4, million_parameters=1, interval_minutes=0.5),
            classes=(NodeClass(role="train"),),
        )
    )
    assert figures(report, "Training")["rounds committed"] >= 1
    assert drawn == [], "equal seeds would give unequal reports"


def test_20_trainers_of_one_run_are_all_in_work_in_clusters() -> None:
    report = simulate(
        Scenario(
            nodes=20,
            minutes=1.5,
            warm_up_minutes=2,
            probes_per_minute=0,
            training=Training(members=4, cluster_size=5, million_parameters=1, interval_minutes=0.5),
            classes=(NodeClass(role="train"),),
        )
    )
    training, last = figures(report, "Training"), report.samples[-1]
    assert [last[f"trainers_{name}"] for name in ("in_work", "waiting", "refused")] == [20, 0, 0]
    assert training[IN_WORK]["min"] == 1
    assert training["contributions"] >= 20 * (training["rounds committed"] - 1)


def test_trainers_beyond_the_places_of_a_run_are_counted_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_training, "INITIAL_FILL", 2.0)  # one run for twice as many as it has places
    report = simulate(
        Scenario(
            nodes=6,
            minutes=3,
            warm_up_minutes=2,
            probes_per_minute=0,
            training=Training(members=2, cluster_size=2, million_parameters=1, interval_minutes=0.5),
            classes=(NodeClass(role="train"),),
        )
    )
    last = report.samples[-1]
    assert [last[f"trainers_{name}"] for name in ("in_work", "waiting", "refused")] == [4, 0, 2]


@pytest.mark.parametrize("name", ["SETTLE_S", "WATCH_S", "LINKS_WITHIN_S"])
def test_simulated_servers_keep_the_times_of_real_ones(name: str) -> None:
    assert getattr(simulated_serving, name) == getattr(span_placer, name)
