"""A node's life in a real process: up, seen by commands, drained, stopped, killed."""

from __future__ import annotations

import asyncio
import io
import signal
import stat
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from support.node_process import Node, wait_until
from support.node_settings import resolve
from swarm.network.libp2p_network import Libp2pNetwork
from swarm_node import daemon, interrupts
from swarm_node.control import ControlClient
from swarm_node.events.emitter import Emitter
from swarm_node.network_join import join_network
from swarm_node.roles.seed import SeedRole
from swarm_node.shutdown import Shutdown
from swarm_node.storage.home import Home
from swarm_protocol.control_messages import StatusReply
from swarm_protocol.identity import Identity

from .conftest import RunHere, Seed, StartNode, run_node

JOIN = ("join", "--take", "nothing", "--network-id", "tests", "--probe", "off", "--device", "cpu")


def test_seed_when_ready_invites_others_with_its_address(seed: Seed) -> None:
    names = [event["event"] for event in seed.node.events]
    assert names == ["step"] * 4 + ["ready"]
    assert [event["number"] for event in seed.node.events[:4]] == [1, 2, 3, 4]
    text = seed.node.err_path.read_text()
    wait_until(
        lambda: f"swarm-node join --peers {seed.addr} --network-id tests" in seed.node.err_path.read_text(), text
    )


def test_status_of_a_seed_shows_what_it_is(seed: Seed, run_here: RunHere) -> None:
    [status] = run_here("status", "--home", seed.node.home).events
    assert status["state"] == "seeding"
    assert status["peer_id"] == seed.peer_id
    assert status["addrs"] == [seed.addr]
    assert status["pid"] == seed.node.process.pid
    assert isinstance(status["memory_bytes"], int)
    assert status["memory_bytes"] > 50 * 2**20
    assert status["training"] is status["serving"] is None


def test_idle_daemon_uses_almost_no_processor_time(seed: Seed) -> None:
    process = psutil.Process(seed.node.process.pid)
    family = [process, *process.children()]

    def used_s() -> float:
        return sum(part.cpu_times().user + part.cpu_times().system for part in family)

    def share_used() -> float:
        before_s, since_s = used_s(), time.monotonic()
        time.sleep(3)  # this is a measurement, not a wait
        return (used_s() - before_s) / (time.monotonic() - since_s)

    # it may have something to do at first: it has just started, or a node has just left it
    assert any(share_used() < 0.03 for _ in range(3))


def test_control_socket_is_open_only_to_its_owner(seed: Seed) -> None:
    assert stat.S_IMODE((seed.node.home / "control.sock").stat().st_mode) == 0o600


def test_start_in_a_locked_home_names_the_daemon(seed: Seed, run_here: RunHere) -> None:
    answer = run_here("seed", "--home", seed.node.home)
    assert f"a daemon (pid {seed.node.process.pid}) is already running in {seed.node.home}" in answer.error
    assert answer.code == 1
    assert seed.node.process.poll() is None


def test_status_shows_the_limits_and_their_use(member: Node, run_here: RunHere) -> None:
    [status] = run_here("status", "--home", member.home).events
    limits = cast(Any, status["limits"])
    assert (limits["max_upload_bytes_per_s"], limits["max_download_bytes_per_s"]) == (2_500_000, 0)
    assert limits["hours"] == ["00:00-24:00"]
    assert limits["upload_bytes_per_s"] >= 0
    assert status["month_budget_bytes"] == 500 * 10**9


def test_join_without_work_waits_for_some(member: Node, run_here: RunHere) -> None:
    steps = [event["title"] for event in member.events if event["event"] == "step"]
    assert steps == ["hardware", "network", "peers", "reachability"]
    assert member.wait_for("step")["title"] == "takes"
    assert "--run" in str(member.wait_for("step")["detail"])
    [status] = run_here("status", "--home", member.home).events
    assert status["state"] == "idle"
    assert isinstance(status["num_peers"], int)
    assert status["num_peers"] >= 2, "the seed and this node, and perhaps some that were killed a moment ago"
    assert status["reachability"] == "this machine only"


def test_status_lists_the_connected_peers_with_path_round_trip_and_bytes(
    seed: Seed, member: Node, run_here: RunHere
) -> None:
    def peers() -> dict[str, dict[str, Any]]:
        [status] = run_here("status", "--home", member.home).events
        return {peer["peer_id"]: peer for peer in cast(list[dict[str, Any]], status["peers"])}

    wait_until(lambda: peers().get(seed.peer_id, {}).get("rtt_ms") is not None, "the connections are looked at")
    found = peers()[seed.peer_id]
    assert found["path"] == "direct"
    assert min(found["sent_bytes"], found["received_bytes"]) > 0


@pytest.mark.parametrize("command", ["drain", "stop"])
def test_drain_and_stop_wait_until_the_daemon_is_gone(start_node: StartNode, run_here: RunHere, command: str) -> None:
    node = start_node("seed", is_light=True)
    node.wait_for("ready")
    answer = run_node(command, "--home", node.home)
    assert [event["event"] for event in answer.events] == ["leaving", "left"]
    assert answer.code == 0
    assert node.wait_end() == 0
    assert node.events[-1]["reason"] == command
    assert "no daemon is running" in run_here(command, "--home", node.home).error, "once is enough"


def test_status_of_a_node_that_was_just_started_has_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(*arguments: Any, **named: Any) -> Libp2pNetwork | None:
        await asyncio.sleep(1)
        return await join_network(*arguments, **named)

    async def scene() -> StatusReply:
        shutdown = Shutdown()
        emitter = Emitter(json=True, out=io.StringIO(), err=io.StringIO())
        life = asyncio.create_task(daemon._live(config, home, emitter, SeedRole(config), shutdown))
        while not home.socket.exists():
            await asyncio.sleep(0.01)
        reply = await asyncio.to_thread(ControlClient(home).status)
        shutdown.request("test")
        await life
        return reply

    monkeypatch.setattr(daemon, "join_network", late)
    home = Home(tmp_path / "home")
    home.create()
    Identity.generate().save(home.identity)
    config = resolve({"home": str(home.path), "network_id": "net", "mdns": "false"}, env={})
    config = config.model_copy(update={"listen": ("/ip4/127.0.0.1/tcp/0",)})
    with home.locked():
        assert asyncio.run(scene()).addrs


def test_start_that_is_interrupted_ends_at_once(seed: Seed, start_node: StartNode) -> None:
    node = start_node(*JOIN, "--peers", seed.addr, "--drain-s", "300", is_light=True)
    node.wait_for("step")
    node.process.send_signal(signal.SIGTERM)
    assert node.wait_end() in {0, 1}, "long before its grace is over"
    assert node.events[-1]["event"] == "stopped"


def test_daemon_that_is_killed_leaves_no_libp2p_process_and_a_usable_home(
    start_node: StartNode, run_here: RunHere
) -> None:
    node = start_node("seed", is_light=True)
    node.wait_for("ready")
    child = node.libp2p
    node.process.kill()
    wait_until(lambda: node.process.poll() is not None, "the killed daemon still runs")
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "libp2p's process outlives us")
    assert "no daemon is running" in run_here("status", "--home", node.home).error
    again = start_node("seed", is_light=True)
    again.wait_for("ready")
    again.process.send_signal(signal.SIGINT)
    assert again.wait_for("draining")["reason"] == "Ctrl-C"
    assert again.wait_end() == interrupts.EXIT_INTERRUPTED
    assert again.events[-1] | {"time": 0} == {"event": "stopped", "time": 0, "reason": "Ctrl-C", "clean": True}
    assert "Traceback" not in again.err_path.read_text()


def test_daemon_whose_libp2p_process_dies_ends_with_the_reason(start_node: StartNode) -> None:
    node = start_node("seed", is_light=True)
    node.wait_for("invite")  # from then on it only waits; before, whatever it just asked of libp2p fails first
    node.libp2p.kill()
    assert "the libp2p daemon ended" in str(node.wait_for("error")["message"])
    assert node.wait_end() == 1
    assert (node.events[-1]["event"], node.events[-1]["clean"]) == ("stopped", False)
