"""Tests of the conditions of the bench of ten thousand nodes: each is broken once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from bench.network_promises import broken_promises
from swarm.simulation.report import Report

LOOKUPS: Mapping[str, Any] = {
    "lookups": 3600,
    "share that found the record": 0.9995,
    "without an answer": 0,
    "records of living nodes not found": 2,
    "hops": {"max": 5},
    "log2 of the nodes": 13.3,
}
SAMPLE: Mapping[str, float] = {
    "nodes": 10_000,
    "records_mean": 5.6,
    "peers_mean": 78,
    "peers_max": 220,
    "addresses_mean": 140,
    "share_in_work": 0.995,
}
SMALL_SAMPLE: Mapping[str, float] = {**SAMPLE, "nodes": 1000, "peers_mean": 57}


def report(last: Mapping[str, float], lookups: Mapping[str, Any] = LOOKUPS, messages: float = 21) -> Report:
    state = {"messages sent a minute": {"median": messages}}
    first = {**last, "records_mean": 5.5}
    sections = {"Lookups": dict(lookups), "A node's state and traffic": state}
    return Report(name="a network", scenario={}, sections=sections, samples=[first, last])


SMALL = report(SMALL_SAMPLE, messages=20)


def test_network_that_keeps_all_promises_has_no_broken_one() -> None:
    assert broken_promises(report(SAMPLE), SMALL) == []


@pytest.mark.parametrize(
    ("figure", "value", "named"),
    [
        ("share that found the record", 0.9989, "lookups: 0.9989"),
        ("share that found the record", None, "lookups: None"),
        ("records of living nodes not found", 4, "records lost: 4 of 3600"),
        ("hops", {"max": 14}, "hops"),
        ("hops", {}, "hops"),
    ],
)
def test_lookups_that_fail_lose_records_or_take_too_many_hops_are_named(figure: str, value: object, named: str) -> None:
    (line,) = broken_promises(report(SAMPLE, {**LOOKUPS, figure: value}), SMALL)
    assert line.startswith(named)


@pytest.mark.parametrize(
    ("figure", "value", "named"),
    [
        ("records_mean", 7.2, "records: 5.5 to 7.2"),
        ("peers_mean", 124, "routing table: 124"),
        ("peers_max", 270, "largest routing table: 270"),
        ("addresses_mean", 160, "known addresses: 160"),
        ("share_in_work", 0.98, "trainers in work: 0.98"),
    ],
)
def test_state_that_grows_and_trainers_out_of_work_are_named(figure: str, value: float, named: str) -> None:
    (line,) = broken_promises(report({**SAMPLE, figure: value}), SMALL)
    assert line.startswith(named)


def test_traffic_that_grows_with_the_network_is_named() -> None:
    assert broken_promises(report(SAMPLE, messages=33), SMALL) == []  # as the logarithm
    assert broken_promises(report(SAMPLE, messages=34), SMALL) == ["messages a minute: 34, 20 in the small network"]
