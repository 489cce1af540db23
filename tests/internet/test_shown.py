"""Tests what `join`, `doctor` and `status` tell nodes behind several kinds of routers about their paths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from internet.conftest import OpenLab
from internet.lab_nodes import NETWORK, LabNode, LabNodes
from support.node_process import wait_until
from swarm_node.control import ControlClient
from swarm_node.storage.home import Home
from swarm_protocol.control_messages import PeerStatus

pytestmark = [pytest.mark.internet, pytest.mark.timeout(300)]

NUM_CALLS = 50
CALL_BYTES = 2000
LOOKED_S = 15.0
"""The paths are looked at every 3 s, and an introduction takes some seconds."""
MEANINGS = {
    "open1": "others reach this node directly",
    "home1": "behind a NAT or a firewall",
    "sym1": "behind a NAT that uses another port for each peer",
}
NOT_YET = ("through relays; nobody has confirmed yet", "nobody has confirmed that others reach this node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Hold what `join` and `doctor` said of each host's reachability, and the peers of home1 by host."""

    joined: dict[str, str]
    examined: dict[str, str]
    peers: dict[str, PeerStatus]


@pytest.fixture(scope="module")
def shown(open_lab: OpenLab) -> Iterator[Shown]:
    with open_lab() as nodes:
        seed = nodes.seed()
        # three public peers have to see a symmetric NAT before it shows
        public, second = nodes.talkers("open1", "open2", peers=seed.public)
        peers = (*seed.public, *public.public, *second.public)
        here, home2, symmetric = nodes.talkers("home1", "home2", "sym1", peers=peers)
        # one after another: a peer dials back for one node at a time, and refuses one that would wait for over 2 s
        examined = {
            host: _reachability(nodes.start(host, "doctor", *NETWORK, peers=peers, port=4002)) for host in MEANINGS
        }
        others = {"open1": public, "home2": home2, "sym1": symmetric}
        for node in others.values():
            call = here.tell("call", peer=node.peer_id, num=NUM_CALLS, pause_s=0.05, num_bytes=CALL_BYTES)
            assert call.result()["failures"] == []

        def seen() -> dict[str, PeerStatus]:
            by_id = {peer.peer_id: peer for peer in ControlClient(Home(here.home)).status().peers}
            return {host: by_id[node.peer_id] for host, node in others.items() if node.peer_id in by_id}

        wait_until(lambda: "home2" in (now := seen()) and now["home2"].path == "punched", "it is punched", LOOKED_S)
        joined = {node.host: _step(node) for node in (public, here, symmetric)}
        yield Shown(joined=joined, examined=examined, peers=seen())


def _step(node: LabNode) -> str:
    [detail] = [event["detail"] for event in node.events if event.get("title") == "reachability"]
    return str(detail)


def _reachability(doctor: LabNode) -> str:
    doctor.wait_end()
    [finding] = [event for event in doctor.events if event.get("check") == "reachability"]
    return f"{finding['message']}; {finding['remedy']}"


def test_nodes_given_only_their_peers_find_a_direct_path_through_their_nats(nodes: LabNodes) -> None:
    here, other = nodes.talkers("home1", "home2", peers=nodes.seed().public, listen=())
    call = here.tell("call", peer=other.peer_id, num=NUM_CALLS, pause_s=0.05, num_bytes=CALL_BYTES)
    assert call.result()["failures"] == []

    def paths() -> dict[str, str]:
        return {peer.peer_id: peer.path for peer in ControlClient(Home(here.home)).status().peers}

    wait_until(lambda: paths().get(other.peer_id) == "punched", "it is punched", LOOKED_S)


@pytest.mark.parametrize("host", MEANINGS)
def test_join_and_doctor_name_the_obstacle_to_reachability(shown: Shown, host: str) -> None:
    said = shown.examined[host]
    assert said.startswith(MEANINGS[host])
    assert ("UPnP" in said) == (host != "open1")
    assert shown.joined[host].startswith((MEANINGS[host], *NOT_YET)), "a node that starts waits for 3 s only"


def test_status_shows_path_round_trip_and_bytes_of_each_peer(shown: Shown) -> None:
    assert shown.peers["home2"].path == "punched"
    assert shown.peers["sym1"].path == "relayed"
    assert shown.peers["open1"].path in {"direct", "dialled back"}, "either side may have dialled first"
    for peer in shown.peers.values():
        assert peer.rtt_ms is not None
        assert peer.sent_bytes >= NUM_CALLS * CALL_BYTES
