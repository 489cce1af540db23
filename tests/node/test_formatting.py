"""The names of reachability follow the seed's answer, limited by the announced addresses, and other texts of values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plain_records import node_record
from swarm_node.dashboard.view_builder import counted, node_view
from swarm_node.formatting import REACHES, name_cell, path_counts, reach, round_trip
from swarm_node.network_snapshot import Listed, NetworkSnapshot

LOOPBACK = "/ip4/127.0.0.1/tcp/1"
PRIVATE = ["/ip4/10.1.2.3/tcp/1", "/ip4/172.31.0.1/udp/1/quic-v1", "/ip6/fd00::7/tcp/1", "/ip4/100.64.0.9/tcp/1"]
FAR = "/ip4/203.0.113.7/tcp/1"


@pytest.mark.parametrize(
    ("found", "addrs", "said"),
    [
        ("public", [LOOPBACK, "/ip6/::1/tcp/1"], "this machine only"),
        ("unknown", [LOOPBACK], "this machine only"),
        ("relay", [LOOPBACK], "relay"),
        ("public", [LOOPBACK, *PRIVATE], "local network only"),
        ("unknown", PRIVATE, "unknown"),
        ("public", [*PRIVATE, FAR], "public"),
        ("public", ["/dns4/node.example/tcp/1"], "public"),
        ("public", ["/ip4/no address/tcp/1"], "public"),
        ("public", ["x"], "public"),
        ("public", [], "public"),
        ("unknown", [FAR], "unknown"),
    ],
)
def test_reach_is_no_further_than_the_announced_addresses(found: str, addrs: list[str], said: str) -> None:
    assert reach(found, addrs) == said


@pytest.mark.parametrize(
    ("rtt_ms", "said"),
    [(None, "–"), (float("nan"), "–"), (0.0, "<1 ms"), (0.4, "<1 ms"), (23.56, "23.6 ms"), (1_500.0, "1.5 s")],
)
def test_round_trip_is_no_more_precise_than_it_was_measured(rtt_ms: float | None, said: str) -> None:
    assert round_trip(rtt_ms) == said


def test_paths_without_a_peer_are_left_out_of_counts() -> None:
    assert path_counts({"direct": 1_200, "dialled back": 3, "punched": 0}) == "1,200 direct, 3 dialled back"
    assert path_counts({"direct": 0}) == "none"


def test_dashboard_counts_local_nodes_separately_from_public_ones() -> None:
    record = replace(node_record("here"), addrs=(LOOPBACK,), reachability="public")
    snapshot = NetworkSnapshot(at=0.0, nodes=Listed(records={"peer": record}, ages_s={}), models={}, runs={})
    view = node_view("peer", snapshot, {"peer": "here"})
    assert view.reachability == "this machine only"
    _, by_reachability = counted([view])
    assert by_reachability == {**dict.fromkeys(REACHES, 0), "this machine only": 1}


def test_name_cell_cuts_a_name_before_its_distinguishing_end() -> None:
    assert name_cell("vm …JoWQrV1z", 24) == "vm …JoWQrV1z"
    assert name_cell("a-rather-long-host-name …JoWQrV1z", 24) == "a-rather-long… …JoWQrV1z"
    assert name_cell("a-rather-long-host-name-without", 24) == "a-rather-long-host-name…"
    assert name_cell("vm …JoWQrV1z", 6) == "vm …J…"
