"""What a network of ten thousand nodes is held to, against the same network with a tenth of the nodes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from swarm.network.dht.routing_table import BUCKET_SIZE
from swarm.simulation.report import Report

LOOKUPS_FOUND = 0.999
IN_WORK = 0.99
"""Share of the trainers that came three intervals ago. The rest are between a head that has left and the next one."""

GROWTH = 1.25
"""Ratio below which a figure of a node counts as constant where the network has ten times the nodes."""


def broken_promises(large: Report, small: Report) -> list[str]:
    """Return the promises that `large` breaks, one line each. `small` has a tenth of its nodes."""
    return [*_broken_lookups(large), *_broken_state(large, small), *_broken_training(large)]


def _broken_lookups(large: Report) -> Iterator[str]:
    lookups: dict[str, Any] = dict(large.sections["Lookups"])
    found, lost = lookups["share that found the record"], lookups["records of living nodes not found"]
    if found is None or found < LOOKUPS_FOUND:
        yield f"lookups: {found} found the record, {lookups['without an answer']} had no answer"
    if lost > (1 - LOOKUPS_FOUND) * lookups["lookups"]:
        yield f"records lost: {lost} of {lookups['lookups']}"
    if lookups["hops"].get("max", math.inf) > lookups["log2 of the nodes"]:
        yield f"hops: {lookups['hops']}"


def _broken_state(large: Report, small: Report) -> Iterator[str]:
    """What a node holds and sends is constant, but for the routing table and the messages that keep it fresh, which
    grow by the logarithm. It does not grow with time either."""
    first, last, few = large.samples[0], large.samples[-1], small.samples[-1]
    if last["records_mean"] > GROWTH * min(first["records_mean"], few["records_mean"]):
        yield f"records: {first['records_mean']} to {last['records_mean']}, {few['records_mean']} in the small network"
    doublings = math.log2(last["nodes"] / few["nodes"])
    if (
        last["peers_mean"] > few["peers_mean"] + BUCKET_SIZE * doublings
    ):  # a network of twice the nodes fills one more bucket
        yield f"routing table: {last['peers_mean']}, {few['peers_mean']} in the small network"
    if last["peers_max"] > BUCKET_SIZE * math.log2(last["nodes"]):
        yield f"largest routing table: {last['peers_max']}"
    if last["addresses_mean"] > 2 * last["peers_mean"]:
        yield f"known addresses: {last['addresses_mean']}"
    sent, few_sent = _messages(large), _messages(small)
    if sent > GROWTH * few_sent * math.log2(last["nodes"]) / math.log2(few["nodes"]):
        yield f"messages a minute: {sent}, {few_sent} in the small network"


def _broken_training(large: Report) -> Iterator[str]:
    if (in_work := large.samples[-1]["share_in_work"]) < IN_WORK:
        yield f"trainers in work: {in_work}"


def _messages(report: Report) -> float:
    state: dict[str, Any] = dict(report.sections["A node's state and traffic"])
    median: float = state["messages sent a minute"]["median"]
    return median
