"""A network whose seeds are gone: real processes rejoin through the peers that they remember."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.free_ports import free_port
from support.node_process import START_S, Node, wait_until
from swarm.network import network_entry
from swarm_protocol.identity import Identity

from .conftest import RunHere, StartNode

UNKNOWN = "12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi"
TOLD_S = 30.0  # some seconds on an idle machine
MEET_S = 60.0
JOIN = ("join", "--take", "nothing", "--network-id", "orphans", "--probe", "off", "--device", "cpu")


@pytest.fixture
def start_light(start_node: StartNode) -> StartNode:
    return partial(start_node, is_light=True)


def remembers(node: Node, peer_id: object) -> bool:
    path = node.home / "peers.json"
    return path.is_file() and peer_id in {each["peer_id"] for each in json.loads(path.read_text())["peers"]}


def test_node_whose_seeds_are_gone_comes_back_through_members(start_light: StartNode, run_here: RunHere) -> None:
    seed = start_light("seed", "--network-id", "orphans", home="seed")
    addrs = seed.wait_for("ready")["addrs"]
    assert isinstance(addrs, list)
    other, node = [start_light(*JOIN, "--peers", addrs[0], home=home) for home in ("other", "node")]
    ready = other.wait_for("ready")
    other_id, other_addrs = ready["peer_id"], ready["addrs"]
    assert isinstance(other_addrs, list)
    node.wait_for("ready")
    wait_until(lambda: remembers(node, other_id), "the node does not remember its peer", START_S)
    wait_until(lambda: remembers(seed, other_id), "the seed does not remember its peer", START_S)
    seed.process.kill()
    node.process.kill()
    node.end()
    again = start_light("seed", "--network-id", "orphans", "--peers", addrs[0], home="seed")
    again.wait_for("ready")
    assert any("joined through remembered peers" in str(event.get("detail")) for event in again.events)
    assert not [event for event in again.events if event["event"] == "warning"], "its own address is no other peer's"
    again.process.kill()
    again.end()

    given = start_light(*JOIN, "--peers", addrs[0], home="node")
    given.wait_for("ready")
    steps = {event["title"]: str(event["detail"]) for event in given.events if event["event"] == "step"}
    assert steps["peers"].endswith(f"joined through remembered peers: {other_id}")
    assert "none of the given peers answered" in [
        str(event["message"]).partition(",")[0] for event in given.events if event["event"] == "warning"
    ]
    given.end()

    newcomer = start_light(*JOIN, "--peers", other_addrs[0], home="newcomer")
    newcomer.wait_for("ready")
    newcomer.end()
    assert other.process.poll() is None

    told_nothing = start_light(*JOIN, home="node")
    told_nothing.wait_for("ready")

    def sees_another() -> bool:
        [status] = run_here("status", "--home", told_nothing.home).events
        assert isinstance(status["num_peers"], int)
        return status["num_peers"] >= 2

    wait_until(sees_another, "the node sees nobody", START_S)
    told_nothing.end()
    other.end()

    alone = start_light(*JOIN, home="node")
    warning = alone.wait_for("warning")
    assert "peers that this node remembers (2) could be reached; this node keeps trying" in str(warning["message"])
    assert str(warning["remedy"]).startswith("give --peers")


HURRY = partial(exec, "from swarm_node import network_join as tried; tried.MIN_PAUSE_S = tried.MAX_PAUSE_S = 0.2")
WAITS = partial(
    exec,
    "from swarm_node import network_join as tried; tried.MIN_PAUSE_S = tried.MAX_PAUSE_S = 0.0; tried.PATIENCE_S = 1e6",
)
NEVER = partial(exec, "from swarm_node import daemon; daemon.JOIN_S = 1e6")


def test_new_node_that_starts_before_its_seed_says_so_once_and_joins_when_the_seed_comes(
    start_light: StartNode, run_here: RunHere
) -> None:
    place = f"/ip4/127.0.0.1/tcp/{free_port()}"
    first = start_light("seed", "--network-id", "orphans", "--listen", place, home="seed")
    addr = f"{place}/p2p/{first.wait_for('ready')['peer_id']}"
    first.end()
    node = start_light(*JOIN, "--peers", addr, home="node", begin=HURRY)
    warning = node.wait_for("warning")
    assert f"none of the given peers could be reached: {addr}: connection refused" in str(warning["message"])
    assert "check the addresses" in str(warning["remedy"])
    [status] = run_here("status", "--home", node.home).events
    assert (status["state"], status["addrs"], status["num_peers"]) == ("starting", [], 0)
    assert status["not_joined"] == str(warning["message"]).removesuffix("; this node keeps trying")
    start_light("seed", "--network-id", "orphans", "--listen", place, home="seed").wait_for("ready")
    node.wait_for("ready")
    assert [event["message"] for event in node.events if event["event"] == "warning"] == [warning["message"]]


def test_node_that_waits_for_its_seed_tells_its_status_at_once(start_light: StartNode, run_here: RunHere) -> None:
    seed = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{UNKNOWN}"
    node = start_light(*JOIN, "--peers", seed, home="node", begin=NEVER)
    node.wait_for("warning")
    [status] = run_here("status", "--home", node.home).events
    assert status["state"] == "starting"


@pytest.mark.parametrize("begin", [None, WAITS], ids=["between two attempts", "within the second"])
@pytest.mark.parametrize("way", ["drain", "stop", "SIGTERM"])
def test_node_that_waits_for_its_seed_leaves_when_told(
    way: str, begin: Callable[[], object] | None, start_light: StartNode, run_here: RunHere
) -> None:
    seed = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{UNKNOWN}"
    node = start_light(*JOIN, "--peers", seed, home="node", begin=begin)
    node.wait_for("warning")
    if way == "SIGTERM":
        node.process.send_signal(signal.SIGTERM)
    else:
        assert run_here(way, "--home", node.home).code == 0
    assert node.wait_end() == 0
    assert node.events[-1] | {"time": 0} == {"event": "stopped", "time": 0, "reason": way, "clean": True}


def test_given_peer_of_another_network_is_named_when_others_are_remembered(
    start_light: StartNode, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_entry, "HEAD_START_S", network_entry.SEED_TIMEOUT_S)  # on a busy machine, too
    member, stranger = [start_light("seed", "--network-id", name, home=name) for name in ("orphans", "others")]
    addrs, wrong = member.wait_for("ready")["addrs"], stranger.wait_for("ready")["addrs"]
    assert isinstance(addrs, list)
    assert isinstance(wrong, list)
    node = start_light(*JOIN, "--peers", addrs[0], home="node")
    member_id = addrs[0].rpartition("/")[2]
    node.wait_for("ready")
    node.end()
    assert remembers(node, member_id)
    error = run_here(*JOIN, "--peers", wrong[0], "--home", node.home).error
    assert "cannot join through the given peers" in error
    assert "'others'" in error
    copied = run_here(*JOIN, "--home", node.home, "--peers", addrs[0], "--network-id", "others")
    assert "'orphans'" in copied.error


def test_seed_comes_back_into_its_network_by_itself(start_light: StartNode) -> None:
    seed = start_light("seed", "--network-id", "orphans", home="seed")
    addrs = seed.wait_for("ready")["addrs"]
    assert isinstance(addrs, list)
    member = start_light(*JOIN, "--peers", addrs[0], home="member")
    member_id = member.wait_for("ready")["peer_id"]
    seed.end()
    assert remembers(seed, member_id)
    again = start_light("seed", "--network-id", "orphans", home="seed")
    again.wait_for("ready")
    steps = {event["title"]: str(event["detail"]) for event in again.events if event["event"] == "step"}
    assert steps["peers"].endswith(f"joined through remembered peers: {member_id}")
    again.end()
    member.end()
    first = start_light("seed", "--network-id", "orphans", home="seed")
    first.wait_for("ready")


@pytest.mark.parametrize("are_apart", [True, False])
def test_two_seeds_that_name_each_other_meet_whenever_they_start(
    are_apart: bool, start_light: StartNode, run_here: RunHere, tmp_path: Path
) -> None:
    places = {name: f"/ip4/127.0.0.1/tcp/{free_port()}" for name in ("early", "late")}
    addrs = {}
    for name, place in places.items():
        (tmp_path / name).mkdir(mode=0o700)
        addrs[name] = f"{place}/p2p/{Identity.load_or_create(tmp_path / name / 'identity.key').peer_id}"

    def start(name: str, other: str) -> Node:
        options = ("--listen", places[name], "--peers", addrs[other])
        return start_light("seed", "--network-id", "orphans", *options, home=name)

    def sees_all(node: Node) -> bool:
        [status] = run_here("status", "--home", node.home).events
        return status["num_peers"] == 3

    early = start("early", "late")
    if are_apart:
        warning = str(early.wait_for("warning", TOLD_S)["message"])
        assert f"none of the given peers could be reached: {addrs['late']}: connection refused" in warning
        assert warning.endswith("; this seed starts alone and keeps trying")
        early.wait_for("ready")
    member = start_light(*JOIN, "--peers", addrs["early"], home="member")
    late = start("late", "early")
    late.wait_for("ready")
    for node in (early, late, member):
        wait_until(partial(sees_all, node), f"{node.home.name} does not see all three", MEET_S)
    if are_apart:
        assert not [event for event in late.events if event["event"] == "warning"]


@pytest.mark.parametrize("role", ["gateway", "dashboard"])
def test_http_server_of_a_node_that_waits_for_its_seed_says_so(role: str, start_light: StartNode) -> None:
    port = free_port()
    place = f"/ip4/127.0.0.1/tcp/{free_port()}"
    first = start_light("seed", "--network-id", "orphans", "--listen", place, home="seed")
    addr = f"{place}/p2p/{first.wait_for('ready')['peer_id']}"
    first.end()
    flags = ("--network-id", "orphans", "--peers", addr, "--port", str(port))
    node = start_light(role, *flags, home="node", begin=HURRY)
    node.wait_for("warning")

    def overview() -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{port}/api/v1/overview", timeout=START_S)

    refusal = overview()
    assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "15")
    assert refusal.json()["error"]["message"] == "this node has not joined its network yet"
    start_light("seed", "--network-id", "orphans", "--listen", place, home="seed")
    node.wait_for("dashboard")
    assert overview().status_code == 200
