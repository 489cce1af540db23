"""A node that serves or uses models keeps in its home what it knows about convicted servers, and reports it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from swarm.serving.evidence.server_bans import ServerBan
from swarm.serving.evidence.server_convictions import ServerConvictions
from swarm_protocol.control_messages import MAX_CONVICTED_LINES
from swarm_protocol.identity import short_id

from swarm_node.formatting import day
from swarm_node.metrics.metric_registry import Reading
from swarm_node.node import Node
from swarm_node.storage.server_evidence import convicted_servers

MAX_LINE_CHARS = 200
"""The protocol's limit for a line of a status."""


@asynccontextmanager
async def kept_convictions(node: Node) -> AsyncIterator[ServerConvictions]:
    """Hold the evidence while the context lasts, and report it in the node's events, status and metrics."""
    store = convicted_servers(node.home.convicted_servers, node.network.network_id)
    held = ServerConvictions(node.network, node.membership, store=store)
    held.watch(lambda ban: _tell(node, ban))
    node.activity.convicted_servers = lambda: tuple(
        line(ban, node.network.peer_id) for ban in held.bans[-MAX_CONVICTED_LINES:]
    )
    try:
        await held.recall()
        with node.metrics.reading(lambda: read_convictions(held)):
            yield held
    finally:
        node.activity.convicted_servers = tuple
        await held.close()


def line(ban: ServerBan, own_peer_id: str = "") -> str:
    """Return who is convicted, of what and until when, as `status` shows it."""
    verdict = ban.verdict
    who = f"{short_id(verdict.peer_id)}{' (this node)' if verdict.peer_id == own_peer_id else ''}"
    return f"{who} is not used until {day(verdict.until)}: it {verdict.reason}"[:MAX_LINE_CHARS]


def read_convictions(held: ServerConvictions) -> Iterator[Reading]:
    """Read how many servers are convicted, and how much evidence was refused because it proved nothing."""
    yield Reading("swarm_node_num_convicted_servers", len(held.peers))
    yield Reading("swarm_node_server_evidence_refused_total", held.num_refused)


def _tell(node: Node, ban: ServerBan) -> None:
    verdict = ban.verdict
    node.emitter.emit(
        "server_convicted",
        peer_id=verdict.peer_id,
        model=verdict.model,
        reason=verdict.reason,
        until=verdict.until,
        until_day=day(verdict.until),
    )
