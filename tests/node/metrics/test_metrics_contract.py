"""The contract in code, docs/reference/metrics.md and the registries agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.site_pages import script
from swarm_node.metrics.metric_contract import METRICS
from swarm_node.metrics.metric_registry import Reading, Registry


def test_docs_of_metrics_equal_the_code() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
    assert page.read_text(encoding="utf-8") == script("contracts").metrics_page(), "run docs/contracts.py"


def test_each_metric_has_a_prometheus_name_and_says_when_it_changes() -> None:
    for name, spec in METRICS.items():
        assert re.fullmatch(r"(swarm|process)(_[a-z0-9]+)+", name)
        assert name.endswith("_total") == (spec.kind == "counter"), name
        assert bool(spec.buckets) == (spec.kind == "histogram"), name
        assert list(spec.buckets) == sorted(set(spec.buckets)), name
        assert spec.about.endswith("."), name
        assert spec.moves, name
        assert "|" not in f"{spec.about}{spec.moves}{spec.labels}", f"{name} is shown in a table"


def test_source_is_read_at_each_exposition_and_only_while_its_context_lasts() -> None:
    registry, running = Registry(), 1.0

    def source() -> list[Reading]:
        return [
            Reading("swarm_node_num_peers", running),
            *(Reading("swarm_network_sent_bytes_total", 5, {"peer": peer}) for peer in ("direct", "relayed")),
        ]

    with registry.reading(source):
        assert _sample(registry, "swarm_node_num_peers") == 1
        running = 2.0
        assert _sample(registry, "swarm_node_num_peers") == 2
        assert _sample(registry, "swarm_network_sent_bytes_total", peer="relayed") == 5
    assert _sample(registry, "swarm_node_num_peers") is None


def test_metric_outside_the_contract_is_a_bug() -> None:
    registry = Registry()
    with pytest.raises(AssertionError, match="not in the contract"):
        registry.counter("swarm_new_total")
    with pytest.raises(AssertionError, match="is a gauge"):
        registry.counter("swarm_node_num_peers")
    wrong = Reading("swarm_node_num_peers", 1, {"peer": "12D3Koo"})
    with registry.reading(lambda: [wrong]), pytest.raises(AssertionError, match="has other labels"):
        registry.exposition()


def _sample(registry: Registry, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(registry.exposition().decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None
