"""Each metric has the value that its source has, under the labels of the contract."""

from __future__ import annotations

import re

import pytest
from support.exposed_metrics import samples, whole_exposition
from swarm_node.gateway.metrics import Metrics, SpotCheckCounter
from swarm_node.metrics.metric_contract import METRICS
from swarm_node.metrics.metric_registry import Registry
from swarm_node.metrics.readings import TrainerMetrics

SUFFIXES = re.compile(r"_(bucket|count|sum|created)$")


def test_every_metric_of_the_contract_is_exposed_and_no_other() -> None:
    found = {sample.name for sample in whole_exposition()}
    families = {name if name in METRICS else SUFFIXES.sub("", name) for name in found}
    # prometheus_client adds the time of a counter's creation itself
    known = {name.removesuffix("_total") for name in METRICS} | set(METRICS)
    assert families <= known
    assert {name for name in METRICS if name not in families} == set()


def test_labels_are_those_of_the_contract() -> None:
    for sample in whole_exposition():
        name = sample.name if sample.name in METRICS else SUFFIXES.sub("", sample.name)
        spec = METRICS.get(name) or METRICS[f"{name}_total"]
        assert set(sample.labels) - {"le"} == set(spec.labels), sample


VALUES: list[tuple[str, dict[str, str], float]] = [
    ("swarm_node_state", {"state": "serving"}, 1),
    ("swarm_node_state", {"state": "draining"}, 0),
    ("swarm_peer_rtt_seconds", {"stat": "median"}, 0.02),
    ("swarm_peer_path_rtt_seconds", {"peer": "direct"}, 0.02),
    ("swarm_peer_path_rtt_seconds", {"peer": "relayed"}, 0.3),
    ("swarm_network_num_connected_peers", {"peer": "dialled_back"}, 0),
    ("swarm_dht_records_refused_total", {}, 6),
    ("swarm_membership_publish_failures_total", {}, 1),
    ("swarm_relay_refusals_total", {"reason": "idle"}, 4),
    ("swarm_relay_refusals_total", {"reason": "stranger"}, 0),
    ("swarm_relay_throttled_seconds_total", {}, 2.5),
    ("swarm_server_kv_cache_usage_perc", {}, 0.5),
    ("swarm_server_num_requests_waiting", {}, 2),
    ("swarm_server_generation_tokens_total", {}, 5),
    ("swarm_server_prompt_tokens_total", {}, 32),
    ("swarm_server_step_seconds_sum", {"phase": "compute", "step": "prompt"}, 0.3),
    ("swarm_server_step_seconds_sum", {"phase": "queue", "step": "generation"}, 0.001),
    ("swarm_server_refusals_total", {"reason": "violation"}, 3),
    ("swarm_gateway_possession_checks_total", {"outcome": "proven"}, 11),
    ("swarm_gateway_possession_checks_total", {"outcome": "failed"}, 1),
    ("swarm_link_receive_bytes_per_second", {"stat": "min"}, 1e5),
    ("swarm_link_receive_bytes_per_second", {"stat": "median"}, 2e5),
    ("swarm_link_num_slow", {"kind": "link"}, 1),
    ("swarm_link_num_slow", {"kind": "sender"}, 0),
    ("swarm_link_own_slowdown", {"direction": "receive"}, 4),
    ("swarm_link_own_slowdown", {"direction": "send"}, 1),
    ("swarm_trainer_outer_step", {}, 7),
    ("swarm_trainer_num_outer_steps", {}, 40),
    ("swarm_trainer_tokens_total", {}, 50),
    ("swarm_trainer_rounds_total", {"result": "committed"}, 1),
    ("swarm_trainer_rounds_total", {"result": "aborted"}, 1),
    ("swarm_trainer_phase_seconds_sum", {"phase": "reduce"}, 1.0),
    ("swarm_trainer_sent_bytes_total", {}, 4000),
    ("swarm_trainer_fetched_bytes_total", {}, 900),
    ("swarm_trainer_refusals_total", {}, 1),
    ("swarm_trainer_held_out_score", {"stat": "own"}, 0.5),
    ("swarm_trainer_held_out_score", {"stat": "min"}, -0.25),
    ("swarm_trainer_held_out_score", {"stat": "median"}, 0.5),
    ("swarm_trainer_num_banned", {}, 3),
    ("swarm_node_num_convicted_servers", {}, 1),
    ("swarm_node_server_evidence_refused_total", {}, 4),
    ("swarm_server_challenges_total", {"outcome": "proven"}, 7),
    ("swarm_server_challenge_bytes_total", {}, 455),
    ("swarm_trainer_intervals_validated_total", {"tier": "close"}, 1),
    ("swarm_trainer_digest_mismatches_total", {}, 2),
    ("swarm_gateway_hop_seconds_sum", {"part": "compute"}, 0.01 + 0.02),
    ("swarm_gateway_hop_seconds_count", {"part": "wire"}, 2),
    ("swarm_gateway_reroutes_total", {"how": "replay"}, 1),
    ("swarm_gateway_spot_checks_total", {"result": "failed"}, 1),
    ("swarm_gateway_proved_lies_total", {}, 1),
    ("swarm_gateway_reroutes_total", {"how": "handover"}, 1),
    ("swarm_gateway_replayed_tokens_total", {}, 6),
    ("swarm_gateway_failover_seconds_sum", {}, 0.6),
]


def test_values_equal_those_of_their_sources() -> None:
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in whole_exposition()}
    wrong = {
        (name, *labels.values()): found.get((name, tuple(sorted(labels.items()))))
        for name, labels, value in VALUES
        if found.get((name, tuple(sorted(labels.items())))) != pytest.approx(value)
    }
    assert wrong == {}


def test_counters_with_few_labels_are_exposed_at_zero_before_anything_is_counted() -> None:
    """Prometheus sees no increase in a series that begins above 0."""
    registry = Registry()
    Metrics(registry)
    SpotCheckCounter(registry)
    TrainerMetrics(registry, 40)
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples(registry.exposition().decode())}
    for name, label in (
        ("swarm_gateway_reroutes_total", "how"),
        ("swarm_gateway_request_success_total", "finished_reason"),
        ("swarm_gateway_spot_checks_total", "result"),
        ("swarm_trainer_rounds_total", "result"),
    ):
        values = re.findall(r"`(\w+)`", METRICS[name].labels[label])
        assert {found.get((name, value)) for value in values} == {0.0}, name
    tiers = {found.get(("swarm_trainer_intervals_validated_total", tier)) for tier in ("exact", "close", "wrong")}
    assert tiers == {0.0}
