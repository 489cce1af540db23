"""The fields of a node's record."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swarm.network.traffic import PeerPath
from swarm_node.dashboard.role import DashboardRole
from swarm_node.gateway.role import GatewayRole
from swarm_node.machine.hardware import Hardware, Speeds
from swarm_node.node import Activity, FirstTokenWait, Node, RoleName
from swarm_node.roles.helper import StandbyRole
from swarm_node.roles.seed import SeedRole
from swarm_node.roles.volunteer import VolunteerRole
from swarm_protocol.records import NodeRecord, PathCounts, PathKind


async def no_addrs() -> tuple[str, ...]:
    return ()


def record_of(activity: Activity, role: RoleName, **more: Any) -> NodeRecord:
    announced: list[NodeRecord] = []
    hardware = Hardware.of("cpu", "cpu", lambda: (2**40, 2**50), Speeds())
    parts: dict[str, Any] = {
        "config": SimpleNamespace(name="a node"),
        "shutdown": SimpleNamespace(leaving=asyncio.Event()),
        "hardware": hardware,
        "network": SimpleNamespace(addrs=no_addrs),
        "membership": SimpleNamespace(announce=announced.append),
    }
    unused = dict.fromkeys(("home", "identity", "emitter", "steps"), cast(Any, None))
    asyncio.run(Node(**parts, **unused, activity=activity, role=role, **more).announce())
    return announced[0]


@pytest.mark.parametrize("role", ["seed", "gateway", "volunteer", ""])
def test_record_says_what_the_node_was_started_as(role: RoleName) -> None:
    record = record_of(Activity(), role)
    assert record.role == role
    assert (record.first_token_p50_s, record.first_token_p95_s) == (None, None)


def test_record_of_a_gateway_tells_how_long_requests_waited() -> None:
    activity = Activity(first_token=lambda: FirstTokenWait(p50_s=0.5, p95_s=2.0))
    record = record_of(activity, "gateway")
    assert (record.first_token_p50_s, record.first_token_p95_s) == (0.5, 2.0)


def test_record_counts_the_connected_peers_by_their_paths() -> None:
    assert record_of(Activity(), "").paths == PathCounts()
    kinds: tuple[PathKind, ...] = ("direct", "dialled back", "punched", "relayed", "punched")
    paths = {f"peer {number}": PeerPath(kind=kind, sent_bytes=1, received_bytes=2) for number, kind in enumerate(kinds)}
    record = record_of(Activity(), "", peer_paths=lambda: paths)
    assert record.paths == PathCounts(direct=1, dialled_back=1, punched=2, relayed=1)


def test_roles_have_the_names_that_records_know() -> None:
    names = [each.name for each in (SeedRole, GatewayRole, VolunteerRole, StandbyRole, DashboardRole)]
    assert names == ["seed", "gateway", "volunteer", "volunteer", ""]
