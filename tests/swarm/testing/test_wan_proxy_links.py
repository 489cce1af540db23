"""The ladder of links: the numbers that issues and benchmarks name, and how two of them meet."""

from __future__ import annotations

import itertools
import math

import pytest
from support.wan_proxy import LINKS, MBIT_BYTES, Connection, link_between


def test_ladder_has_its_names_from_best_to_worst() -> None:
    assert list(LINKS) == ["lan", "fibre", "cable", "dsl", "mobile", "awful"]
    for better, worse in itertools.pairwise(LINKS.values()):
        assert better.up_bytes_per_s > worse.up_bytes_per_s
        assert better.down_bytes_per_s > worse.down_bytes_per_s
        assert better.latency_s < worse.latency_s
        assert better.loss <= worse.loss


def test_cable_is_200_down_20_up_25_ms() -> None:
    cable = LINKS["cable"]
    assert cable.down_bytes_per_s == 200 * MBIT_BYTES == 25_000_000
    assert cable.up_bytes_per_s == 20 * MBIT_BYTES
    assert cable.latency_s == 0.025


def test_link_between_adds_latencies_and_takes_the_narrower_rate() -> None:
    link = link_between(LINKS["cable"], LINKS["dsl"])
    assert link.latency_s == pytest.approx(0.055)
    assert link.bandwidth_bytes_per_s == 20 * MBIT_BYTES
    assert link_between(LINKS["dsl"], LINKS["cable"]).bandwidth_bytes_per_s == 10 * MBIT_BYTES
    assert link_between(LINKS["awful"], LINKS["awful"]).loss == pytest.approx(1 - 0.98**2)


def test_connection_with_impossible_values_is_refused() -> None:
    for wrong in ({"latency_s": math.nan}, {"up_bytes_per_s": 0.0}, {"loss": 1.0}):
        values = {"name": "x", "down_bytes_per_s": 1.0, "up_bytes_per_s": 1.0, "latency_s": 0.0, "jitter_s": 0.0}
        with pytest.raises(ValueError, match="must be"):
            Connection(**{**values, **wrong})
