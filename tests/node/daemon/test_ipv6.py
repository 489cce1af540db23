"""A network over IPv6 alone: a seed, a relayed node, a dashboard and its readers, on ::1."""

from __future__ import annotations

import socket

import httpx
import pytest
from node.daemon.conftest import RunHere, StartNode
from support.node_process import START_S, Node, wait_until

NETWORK = ("--network-id", "six")
LISTEN = ("--listen", "/ip6/::1/tcp/0")
JOIN = ("join", *NETWORK, "--take", "nothing", "--probe", "off", "--device", "cpu")


@pytest.fixture(autouse=True)
def needs_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")


def addrs(node: Node) -> list[str]:
    found = node.wait_for("ready")["addrs"]
    assert isinstance(found, list)
    return found


def test_network_on_ipv6_alone(start_node: StartNode, run_here: RunHere) -> None:
    seed = start_node("seed", *NETWORK, *LISTEN, home="seed", is_light=True)
    [addr] = addrs(seed)
    assert addr.startswith("/ip6/::1/tcp/")
    join_line = f"swarm-node join --peers {addr} --network-id six"
    assert seed.wait_for("invite")["command"] == join_line

    relayed = start_node(*JOIN, "--relay", "use", *LISTEN, "--peers", addr, home="relayed", is_light=True)
    board = ("dashboard", *NETWORK, *LISTEN, "--peers", addr, "--host", "::1", "--port", "0")
    dashboard = start_node(*board, home="board", is_light=True)
    assert any(each.startswith(f"{addr}/p2p-circuit/p2p/") for each in addrs(relayed))
    [dashboard_addr] = addrs(dashboard)
    assert dashboard_addr.startswith("/ip6/::1/tcp/")

    url = str(dashboard.wait_for("dashboard")["url"])
    assert url.startswith("http://[::1]:")

    def overview() -> dict[str, object]:
        found: dict[str, object] = httpx.get(f"{url}/api/v1/overview", timeout=120).json()
        return found

    wait_until(lambda: overview()["num_nodes"] == 3, "the seed, the relayed node and the dashboard", START_S)
    assert overview()["join_command"] == join_line
    assert httpx.get(url, timeout=120).status_code == 200
    assert httpx.get(url, headers={"host": "evil.example"}, timeout=120).status_code == 421
    [event] = run_here("top", "--url", url).events
    assert isinstance(event["overview"], dict)
    assert event["overview"]["nodes_by_reachability"] == overview()["nodes_by_reachability"]
    doctor = run_here("doctor", *NETWORK, *LISTEN, "--peers", addr, "--home", relayed.home)
    assert (doctor.code, [event["check"] for event in doctor.events if event["result"] == "fail"]) == (0, [])
