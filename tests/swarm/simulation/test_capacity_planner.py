"""Tests of the search for the smallest sufficient number of nodes, and of its section in the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from swarm.simulation.capacity_planner import Try, plan_capacity, with_number
from swarm.simulation.report import ANSWERED, COVERED, TOKENS_PER_S, UTILIZATION, Report
from swarm.simulation.scenario import Model, NodeClass, Plan, Scenario, Training
from swarm.simulation.world import simulate

SCENARIO = Scenario(
    nodes=100,
    model=Model(blocks=4),
    plan=Plan(vary="servers", most=400),
    classes=(
        NodeClass(name="servers", role="serve", share=0.5),
        NodeClass(name="gateways", role="gateway", share=0.1),
        NodeClass(name="others", share=0.4),
    ),
)


def num_servers(scenario: Scenario) -> int:
    return round(scenario.classes[0].share)


def served(scenario: Scenario, enough: int, answered: object = 1.0) -> Report:
    """Return a report in which the goals are met from `enough` servers on."""
    covered = 1.0 if num_servers(scenario) >= enough else 0.5
    sections = {"Serving": {ANSWERED: answered, COVERED: covered}}
    return Report(name="", scenario={"nodes": scenario.nodes}, sections=sections, samples=())


@pytest.mark.parametrize("enough", [1, 2, 7, 49, 50, 51, 130, 399, 400])
def test_fewest_nodes_that_are_enough_are_found(enough: int) -> None:
    tries = list[Try]()
    report = plan_capacity(SCENARIO, lambda each: served(each, enough), tries.append)
    found = report.sections["Plan"]["fewest servers nodes that are enough"]
    assert isinstance(found, int)
    assert enough <= found <= max(enough + 1, 1.06 * enough)
    assert len(tries) <= 10
    assert report.scenario["nodes"] == 50 + found  # the others are as many as before
    assert sum(bool(each.missed) for each in tries) == sum(each.num_nodes < enough for each in tries)


def test_plan_that_no_number_meets_names_the_missed_goals() -> None:
    report = plan_capacity(SCENARIO, lambda each: served(each, 401), lambda _: None)
    assert report.sections["Plan"]["fewest servers nodes that are enough"] == "more than 400"
    assert report.sections["Plan"]["with 400"] == f"{COVERED} 0.5"
    unknown = plan_capacity(SCENARIO, lambda each: served(each, 1, answered=None), lambda _: None)
    assert unknown.sections["Plan"]["with 400"] == f"{ANSWERED} -"


def test_plan_for_trainers_uses_their_utilization() -> None:
    scenario = Scenario(nodes=10, training=Training(), plan=Plan(vary="volunteer"), classes=(NodeClass(role="train"),))

    def trained(scenario: Scenario) -> Report:
        sections = {"Training": {UTILIZATION: 0.9 if num_servers(scenario) >= 4 else 0.7}}
        return Report(name="", scenario={}, sections=sections, samples=())

    found = plan_capacity(scenario, trained, lambda _: None)
    assert found.sections["Plan"]["fewest volunteer nodes that are enough"] == 4


def test_plan_may_set_the_median_speed_of_an_answer() -> None:
    assert SCENARIO.plan is not None
    scenario = replace(SCENARIO, plan=replace(SCENARIO.plan, answer_tokens_per_s=5.0))

    def served_at_speed(scenario: Scenario) -> Report:
        speed = {"median": 6.0 if num_servers(scenario) >= 70 else 3.0}
        return replace(served(scenario, 1), sections={"Serving": {ANSWERED: 1.0, COVERED: 1.0, TOKENS_PER_S: speed}})

    report = plan_capacity(scenario, served_at_speed, lambda _: None)
    assert 70 <= cast("int", report.sections["Plan"]["fewest servers nodes that are enough"]) <= 74
    assert report.sections["Plan"]["with 50"] == f"{TOKENS_PER_S} 3"


def test_plan_of_a_real_simulation_needs_servers_for_every_block() -> None:
    classes: tuple[Any, ...] = (
        NodeClass(name="servers", role="serve", share=4, memory_gib=0.3),
        NodeClass(name="gateways", role="gateway", share=2),
    )
    small = Scenario(
        nodes=6,
        minutes=1,
        warm_up_minutes=3,
        model=Model(blocks=4, block_mib=100),
        plan=Plan(vary="servers", most=8, share_answered=0.9, share_covered=0.9),
        classes=classes,
    )
    report = plan_capacity(small, simulate, lambda _: None)
    found = report.sections["Plan"]["fewest servers nodes that are enough"]
    assert found in (2, 3, 4)  # a server has memory for two of four blocks


def test_number_of_other_classes_stays() -> None:
    changed = with_number(SCENARIO, 7)
    assert changed.nodes == 57
    assert [kind.share for kind in changed.classes] == [7, 10, 40]
