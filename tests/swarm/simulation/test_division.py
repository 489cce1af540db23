"""Tests of the division of nodes among processes, and of the number of processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from swarm.simulation import distant_hosts
from swarm.simulation.distant_hosts import BUSY_WEIGHT, Division, num_processes
from swarm.simulation.scenario import NodeClass, Region, Scenario, Training

TRAINERS, IDLE = NodeClass(name="trainers", role="train", share=0.05), NodeClass(name="idle", share=0.95)
TRAINED = Scenario(nodes=10_000, classes=(TRAINERS, IDLE), training=Training())


def idle_of(scenario: Scenario, number: int) -> list[float]:
    """Return the share of the nodes that only keep records in each of `number` processes."""
    each = Counter(Division(scenario, number).process_of(node, IDLE) for node in range(1, 10_001))
    return [each[process] / 10_000 for process in range(number)]


@pytest.mark.parametrize("number", [2, 3])
def test_nodes_that_only_keep_records_are_spread_evenly(number: int) -> None:
    assert idle_of(Scenario(), number) == pytest.approx([1 / number] * number, abs=0.01)


def test_process_with_the_trainers_has_fewer_other_nodes() -> None:
    assert {Division(TRAINED, 2).process_of(node, TRAINERS) for node in range(1, 100)} == {0}
    first, second = idle_of(TRAINED, 2)
    assert first * IDLE.share + BUSY_WEIGHT * TRAINERS.share == pytest.approx(second * IDLE.share, abs=0.01)


def test_trainers_of_a_scenario_without_training_are_like_all_others() -> None:
    assert Division(Scenario(classes=(TRAINERS, IDLE)), 2).process_of(2, TRAINERS) in {0, 1}
    processes = {Division(Scenario(classes=(TRAINERS, IDLE)), 2).process_of(node, TRAINERS) for node in range(1, 9)}
    assert processes == {0, 1}


def test_more_trainers_than_fill_a_process_leave_the_others_to_the_second() -> None:
    many = NodeClass(role="train", share=1.0)
    assert idle_of(Scenario(classes=(many, IDLE), training=Training()), 2) == [0, 1]


def test_number_of_processes_is_one_for_few_nodes_or_low_latencies_and_else_as_asked_for_or_by_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = Scenario(nodes=1999), Scenario(nodes=2000)
    for num_cores, number in ((1, 1), (2, 2), (64, 2)):
        monkeypatch.setattr(distant_hosts, "_num_cores", lambda cores=num_cores: cores)
        assert num_processes(small) == 1
        assert num_processes(large) == number
    assert num_processes(small, 3) == 3
    assert num_processes(replace(large, regions=(Region(latency_ms=0.0),)), 3) == 1, "no process can run ahead"
