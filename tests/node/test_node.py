"""The fields of a node's record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swarm.network.traffic import PeerPath, Traffic
from swarm_node.dashboard.app import DashboardRole
from swarm_node.gateway.role import GatewayRole
from swarm_node.lending.lending import Lending
from swarm_node.lending.traffic_count import LinkUse
from swarm_node.machine.hardware import Hardware, Speeds
from swarm_node.node import Activity, Node, RoleName
from swarm_node.roles.helper import StandbyRole
from swarm_node.roles.seed import SeedRole
from swarm_node.roles.volunteer import VolunteerRole
from swarm_node.settings.config import Config
from swarm_protocol.control_messages import TrainingStatus
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import peer_id_of
from swarm_protocol.records import NodeRecord, PathCounts, PathKind
from swarm_protocol.version import PROTOCOL_VERSION


async def no_addrs() -> tuple[str, ...]:
    return ()


async def no_round_trips(*_: object, **__: object) -> dict[str, float]:
    return {}


def node_with(activity: Activity, role: RoleName, announced: list[NodeRecord], **more: Any) -> Node:
    hardware = Hardware.of("cpu", "cpu", lambda: (2**40, 2**50), Speeds())
    parts: dict[str, Any] = {
        "config": Config(home=Path("/nowhere"), name="a node"),
        "shutdown": SimpleNamespace(leaving=asyncio.Event()),
        "hardware": hardware,
        "network": SimpleNamespace(addrs=no_addrs, peer_id=peer_id_of(bytes(32)), network_id="net"),
        "membership": SimpleNamespace(announce=announced.append, rtts_ms=no_round_trips),
        "lending": Lending((), 0, cast(Any, None)),
        "link_use": LinkUse(Traffic(), 0.0),
    }
    unused = dict.fromkeys(("home", "identity", "emitter", "steps"), cast(Any, None))
    return Node(**parts, **unused, activity=activity, role=role, **more)


def record_of(activity: Activity, role: RoleName, **more: Any) -> NodeRecord:
    announced: list[NodeRecord] = []
    asyncio.run(node_with(activity, role, announced, **more).announce())
    return announced[0]


def test_status_of_a_trainer_names_the_members_that_it_waits_for() -> None:
    training = TrainingStatus(run="r", outer_step=1, num_outer_steps=2, tokens_per_s=533.0)
    activity = Activity(training=training, waits=lambda shown: replace(shown, waits_for="5Z1T2a", waits_s=75.0))
    reply = asyncio.run(node_with(activity, "volunteer", []).status())
    assert reply.training == replace(training, waits_for="5Z1T2a", waits_s=75.0)


@pytest.mark.parametrize("role", ["seed", "gateway", "volunteer", ""])
def test_record_has_the_role_of_the_node(role: RoleName) -> None:
    record = record_of(Activity(), role)
    assert (record.role, record.protocol_version) == (role, PROTOCOL_VERSION)
    assert (record.first_token_p50_s, record.first_token_p95_s) == (None, None)


def test_record_of_a_gateway_has_the_waiting_time_of_requests() -> None:
    activity = Activity(first_token_s=lambda: (0.5, 2.0))
    record = record_of(activity, "gateway")
    assert (record.first_token_p50_s, record.first_token_p95_s) == (0.5, 2.0)


def test_record_counts_the_connected_peers_by_their_paths() -> None:
    assert record_of(Activity(), "").paths == PathCounts()
    kinds: tuple[PathKind, ...] = ("direct", "dialled back", "punched", "relayed", "punched")
    paths = {f"peer {number}": PeerPath(kind=kind, sent_bytes=1, received_bytes=2) for number, kind in enumerate(kinds)}
    record = record_of(Activity(), "", peer_paths=lambda: paths)
    assert record.paths == PathCounts(direct=1, dialled_back=1, punched=2, relayed=1)


def test_record_is_unchanged_while_the_node_s_addresses_are_unavailable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The node goes on working, for example when it has no free file for a moment to ask libp2p's daemon."""
    announced: list[NodeRecord] = []
    node = node_with(Activity(), "volunteer", announced)

    async def unknown() -> tuple[str, ...]:
        raise PeerUnreachable("libp2p's daemon does not answer: too many open files")

    node.network = cast(Any, SimpleNamespace(addrs=unknown))
    asyncio.run(node.announce())
    assert announced == []
    assert "is not published yet: libp2p's daemon does not answer: too many open files" in caplog.text


def test_roles_have_the_names_that_records_know() -> None:
    names = [each.name for each in (SeedRole, GatewayRole, VolunteerRole, StandbyRole, DashboardRole)]
    assert names == ["seed", "gateway", "volunteer", "volunteer", ""]
