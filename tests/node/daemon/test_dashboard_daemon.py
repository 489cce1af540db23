"""`swarm-node dashboard` as a process on a real network: it shows the nodes live, and ends when asked to."""

from __future__ import annotations

import json
import signal
import time

import httpx
from node.daemon.conftest import RunHere, Seed, StartNode
from support.node_process import START_S, Node, wait_until


def test_dashboard_shows_a_real_network(seed: Seed, member: Node, start_node: StartNode, run_here: RunHere) -> None:
    board = ("dashboard", "--network-id", "tests", "--peers", seed.addr, "--port", "0")
    node = start_node(*board, home="dashboard", is_light=True)
    url = str(node.wait_for("dashboard")["url"])

    def peers() -> set[str]:
        return {each["peer_id"] for each in httpx.get(f"{url}/api/v1/nodes", timeout=120).json()}

    # others may be listed, too: the seed remembers those of earlier tests for a minute
    wait_until(lambda: seed.peer_id in peers() and len(peers()) >= 3, "the seed, the member and itself", START_S)
    assert run_here("doctor", "--network-id", "tests", "--peers", seed.addr, "--home", node.home).code == 0
    asked_at = time.time()
    wait_until(
        lambda: httpx.get(f"{url}/api/v1/overview", timeout=120).json()["at"] > asked_at, "another look", START_S
    )
    names = {each["name"] for each in httpx.get(f"{url}/api/v1/nodes", timeout=120).json()}
    assert names
    assert "doctor" not in names, "it was here, and lends nothing"

    def path_to_the_seed() -> dict[str, object]:
        nodes = {each["peer_id"]: each for each in httpx.get(f"{url}/api/v1/nodes", timeout=120).json()}
        return nodes[seed.peer_id]["from_here"] or {}

    # its lookups go to the seed, whose answers show the round trip
    wait_until(lambda: path_to_the_seed().get("rtt_ms") is not None, "the path is looked at", START_S)
    assert path_to_the_seed()["kind"] == "direct"
    overview = httpx.get(f"{url}/api/v1/overview", timeout=120).json()
    assert overview["stale"] is None
    assert overview["nodes_by_state"]["alive"] >= 3
    assert overview["join_command"] == f"swarm-node join --peers {seed.addr} --network-id tests"
    page = httpx.get(url, timeout=120)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    stranger = httpx.get(url, headers={"host": "evil.example"}, timeout=10)
    assert stranger.status_code == 421, "a page of another host name must not be let in"
    with httpx.stream("GET", f"{url}/api/v1/events", timeout=120) as events:
        lines = events.iter_lines()
        assert next(lines) == "event: overview"
        assert json.loads(next(lines).removeprefix("data: "))["network_id"] == "tests"
        node.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert all(line == "" or line.startswith(("event: ", "data: ")) for line in rest), (
        "the stream must be ended, and its connection not broken"
    )
    assert node.wait_end() == 0
    assert (node.home / "history.sqlite").is_file()
