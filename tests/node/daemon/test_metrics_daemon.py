"""Real daemons answer Prometheus at the given address and nowhere else, and send traces."""

from __future__ import annotations

import resource
import signal
import socket
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
from support.exposed_metrics import scraped
from support.node_process import Node, wait_until
from swarm_node import daemon
from swarm_node.daemon import MAX_OPEN_FILES
from swarm_node.metrics.metric_contract import NODE
from swarm_protocol.identity import Identity

from .conftest import RunHere, Seed, StartNode


def test_node_opens_about_as_many_files_as_allowed_when_the_hard_limit_is_higher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hard limit of macOS is infinite, and many Macs allow fewer files than MAX_OPEN_FILES."""
    given = list[tuple[int, int]]()

    def set_limit(_which: int, limits: tuple[int, int]) -> None:
        if limits[0] > 61_440:
            raise ValueError("current limit exceeds maximum limit")
        given.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    daemon._ask_for_open_files()
    assert given == [(MAX_OPEN_FILES // 2, resource.RLIM_INFINITY)]


def test_seed_answers_metrics_at_the_address_that_it_prints(start_node: StartNode) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # many systems give 1,024 to a program that does not request more
    allow_few_files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (512, allowed))
    node = start_node("seed", "--metrics", "127.0.0.1:0", is_light=True, begin=allow_few_files)
    url = str(node.wait_for("metrics")["url"])
    peer_id = node.wait_for("ready")["peer_id"]
    node.wait_for("invite")
    found = scraped(url)
    [info] = [name for name in found if name.startswith("swarm_node_info,")]
    assert str(peer_id) in info
    assert found["swarm_node_state,seeding"] == 1
    assert found["swarm_node_num_peers"] == 1
    assert found["swarm_libp2p_memory_bytes"] > 2**20
    assert found["process_resident_memory_bytes"] > 50 * 2**20
    assert found["process_max_fds"] == min(allowed, MAX_OPEN_FILES), "it requests what the system gives"
    absent = {name for name in NODE if not any(each.startswith(name) for each in found)}
    of_peers = {"swarm_peer_rtt_seconds", "swarm_peer_path_rtt_seconds"}
    of_models = {"swarm_node_num_convicted_servers", "swarm_node_server_evidence_refused_total"}
    assert absent == of_peers | of_models, "it has no peers, and serves and uses no model"
    for path in ("/", "/metrics/x"):
        with pytest.raises(HTTPError, match="404"):
            urlopen(url.replace("/metrics", path), timeout=120)
    node.process.send_signal(signal.SIGTERM)
    assert node.wait_end() == 0


def test_node_that_cannot_join_answers_metrics_and_says_that_it_has_not_joined(start_node: StartNode) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    node = start_node("dashboard", "--port", "0", "--peers", nobody, "--metrics", "127.0.0.1:0", is_light=True)
    url = str(node.wait_for("metrics")["url"])
    node.wait_for("warning")
    found = scraped(url)
    assert found["swarm_node_state,starting"] == 1
    assert found["swarm_node_num_peers"] == 0
    assert any(name.startswith("swarm_node_info,") for name in found)
    assert "swarm_node_start_time_seconds" not in found
    node.process.send_signal(signal.SIGTERM)
    assert node.wait_end() == 0


def test_nothing_listens_for_metrics_without_the_option(seed: Seed) -> None:
    assert "metrics" not in [event["event"] for event in seed.node.events]
    listening = [each for each in psutil.Process(seed.node.process.pid).net_connections() if each.status == "LISTEN"]
    assert listening == []


def test_address_that_is_taken_or_another_machine_s_ends_the_start_before_anything_else(
    run_here: RunHere, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, why in (("127.0.0.1", "the port is in use"), ("192.0.2.1", "assign requested address")):
            answer = run_here("seed", "--home", tmp_path, "--metrics", f"{host}:{port}")
            assert answer.code == 1
            assert f"metrics cannot be served on {host} port {port}: " in answer.error
            assert why in answer.error
            assert "give --metrics" in answer.error
            assert [event["event"] for event in answer.events] == ["error"]


def test_joining_node_counts_its_calls_to_the_seed(seed: Seed, start_node: StartNode) -> None:
    join = (
        "join",
        "--take",
        "nothing",
        "--network-id",
        "tests",
        "--probe",
        "off",
        "--device",
        "cpu",
        "--peers",
        seed.addr,
    )
    node: Node = start_node(*join, "--metrics", "127.0.0.1:0", is_light=True)
    url = str(node.wait_for("metrics")["url"])
    node.wait_for("ready")
    wait_until(lambda: scraped(url)["swarm_network_num_connected_peers,direct"] >= 1, "the seed is connected")
    found = scraped(url)
    assert found["swarm_network_sent_bytes_total,direct"] > 0
    assert found["swarm_network_received_bytes_total,direct"] > 0
    for indirect in ("dialled_back", "punched", "relayed"):
        assert found[f"swarm_network_sent_bytes_total,{indirect}"] == 0
        assert found[f"swarm_network_num_connected_peers,{indirect}"] == 0
    assert found["swarm_dht_num_peers"] >= 1
