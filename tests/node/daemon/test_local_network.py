"""Real nodes on two hosts of one local network find each other by multicast, by names of a real DNS server, and by
IPv6.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from internet.namespaces import enter
from support import name_server
from support.network_namespaces import Namespace, local_network
from support.node_process import COMMAND, Node, wait_until

JOIN = ("join", "--take", "nothing", "--network-id", "lan", "--probe", "off", "--device", "cpu")
SEED = ("seed", "--network-id", "lan")
IP4, IP6 = "/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"

StartThere = Callable[..., Node]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Namespace, Namespace]]:
    with local_network(("192.168.77.1/24", "fd00:77::1/64"), ("192.168.77.2/24", "fd00:77::2/64")) as found:
        yield found


@pytest.fixture
def start_there(tmp_path: Path) -> Iterator[StartThere]:
    nodes: list[Node] = []

    def start(host: Namespace, *arguments: object, home: str, asks_for_names: bool = False) -> Node:
        """Start a node on that host: a fork, or its own program if it has to read the host's resolv.conf."""
        how: dict[str, Any] = {"is_light": True, "begin": partial(enter, host.name)}
        if asks_for_names:
            how = {"command": host.command(*COMMAND)}
        nodes.append(Node(*arguments, home=tmp_path / home, **how))
        return nodes[-1]

    yield start
    for node in nodes:
        node.end()


def way_in(node: Node) -> str:
    node.wait_for("ready")
    [step] = [event for event in node.events if event["event"] == "step" and event["title"] == "peers"]
    return str(step["detail"])


def knows(path: Path, peer_id: str) -> bool:
    return path.is_file() and peer_id in path.read_text()


def test_nodes_of_one_local_network_join_without_an_address(
    hosts: tuple[Namespace, Namespace], start_there: StartThere
) -> None:
    one, other = hosts
    seed = start_there(one, *SEED, "--listen", IP6, home="seed")
    seed_id = seed.wait_for("ready")["peer_id"]
    node = start_there(other, *JOIN, "--listen", IP6, home="node")
    assert way_in(node).endswith(f"; joined through nodes of the local network: {seed_id}")


def test_seeds_that_were_started_separately_become_one_network(
    hosts: tuple[Namespace, Namespace], start_there: StartThere
) -> None:
    seeds = [start_there(host, *SEED, "--listen", IP4, home=f"seed{number}") for number, host in enumerate(hosts)]
    ids = [str(seed.wait_for("ready")["peer_id"]) for seed in seeds]
    remembered = [seed.home / "peers.json" for seed in seeds]
    for path, other_id in zip(remembered, reversed(ids), strict=True):
        wait_until(partial(knows, path, other_id), "the seeds have not met")
    invites = [seed.wait_for("invite")["command"] for seed in seeds]
    assert "/ip4/192.168.77.1/tcp/4001/p2p/" in str(invites[0])


@pytest.fixture
def names(hosts: tuple[Namespace, Namespace], tmp_path: Path) -> Iterator[Callable[[name_server.Zone], None]]:
    """Start a DNS server on the second host, which all hosts use."""
    running: list[subprocess.Popen[str]] = []

    def start(zone: name_server.Zone) -> None:
        host = hosts[1]
        path = tmp_path / "zone.json"
        path.write_text(json.dumps(zone))
        host.resolver.parent.mkdir(parents=True, exist_ok=True)
        host.resolver.write_text("nameserver 127.0.0.1\nsearch swarm.test\n")
        server = host.command(sys.executable, str(name_server.__file__), "53", str(path))
        running.append(subprocess.Popen(server, stdout=subprocess.PIPE, text=True))
        assert running[0].stdout is not None
        assert running[0].stdout.readline() == "ready\n"

    yield start
    for server in running:
        server.kill()
        server.communicate()


def test_node_joins_by_names_of_a_real_name_server(
    hosts: tuple[Namespace, Namespace],
    start_there: StartThere,
    names: Callable[[name_server.Zone], None],
) -> None:
    one, other = hosts
    seed = start_there(one, *SEED, "--listen", IP4, "--listen", IP6, "--no-mdns", home="seed")
    seed_id = seed.wait_for("ready")["peer_id"]
    names(
        {
            "_dnsaddr.swarm.test TXT": [f"dnsaddr=/dnsaddr/more.swarm.test/p2p/{seed_id}"],
            "_dnsaddr.more.swarm.test TXT": [f"dnsaddr=/dns6/seed.swarm.test/tcp/4001/p2p/{seed_id}"],
            "seed.swarm.test A": ["192.168.77.1"],
            "seed.swarm.test AAAA": ["fd00:77::1"],
            "evil.test A": ["127.0.0.1"],
        }
    )
    for number, peers in enumerate(("swarm.test", f"/dns4/seed/tcp/4001/p2p/{seed_id}")):
        node = start_there(other, *JOIN, "--no-mdns", "--peers", peers, home=f"node{number}", asks_for_names=True)
        assert way_in(node) == f"{2 + number} live, this one included"
    evil = ("--peers", f"/dns4/evil.test/tcp/4001/p2p/{seed_id}")
    node = start_there(other, *JOIN, "--listen", IP4, "--no-mdns", *evil, home="refused", asks_for_names=True)
    assert "evil.test leads to 127.0.0.1, which is this machine itself" in str(node.wait_for("warning")["message"])
