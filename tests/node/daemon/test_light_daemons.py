"""Daemons that do not compute are ready without torch, and within little memory."""

from __future__ import annotations

import psutil
from node.daemon.conftest import STAND_BY, Seed, StartNode
from support.node_process import Node

SEED_BYTES = 110 * 2**20  # it takes 70
DASHBOARD_BYTES = 180 * 2**20  # it takes 121
GATEWAY_BYTES = 200 * 2**20  # it takes 143


def libraries_of(node: Node) -> set[str]:
    """Return the files that the process has mapped, which are its shared libraries, with torch's if it is loaded."""
    process = psutil.Process(node.process.pid)
    if hasattr(process, "memory_maps"):
        return {each.path for each in process.memory_maps()}
    return set()


def assert_is_light(node: Node, max_bytes: int) -> None:
    heavy = {path for path in libraries_of(node) if "/torch/" in path or "libtorch" in path or "/hivemind/" in path}
    assert not heavy
    held_bytes = psutil.Process(node.process.pid).memory_info().rss
    assert held_bytes < max_bytes, f"{held_bytes / 2**20:.0f} MiB"


def test_ready_seed_has_not_loaded_torch(start_node: StartNode) -> None:
    node = start_node("seed", "--network-id", "light", "--listen", "/ip4/127.0.0.1/tcp/0", home="light-seed")
    node.wait_for("invite")
    assert_is_light(node, SEED_BYTES)


def test_ready_node_without_work_has_not_loaded_torch_when_it_need_not_look_for_some(
    seed: Seed, start_node: StartNode
) -> None:
    node = start_node(*STAND_BY, "--peers", seed.addr, home="light-member")
    node.wait_for("ready")
    assert_is_light(node, SEED_BYTES)


def test_ready_dashboard_has_not_loaded_torch(seed: Seed, start_node: StartNode) -> None:
    node = start_node("dashboard", "--network-id", "tests", "--peers", seed.addr, "--port", "0", home="light-dashboard")
    node.wait_for("dashboard")
    assert_is_light(node, DASHBOARD_BYTES)


def test_ready_gateway_has_not_loaded_torch(seed: Seed, start_node: StartNode) -> None:
    node = start_node("gateway", "--network-id", "tests", "--peers", seed.addr, "--port", "0", home="light-gateway")
    node.wait_for("listening")
    assert_is_light(node, GATEWAY_BYTES)
