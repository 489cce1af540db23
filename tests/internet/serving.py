"""Servers of a tiny model on hosts of the lab."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from internet.lab import PORT
from internet.lab_nodes import JOIN, LabNode, LabNodes
from support.tiny_models import NUM_BLOCKS

PROMPT = list(range(40, 56))


def started_servers(nodes: LabNodes, host: str, model: Path, peers: Sequence[str], *, num: int) -> list[LabNode]:
    """Start so many nodes on one host, each of which serves the whole model."""
    serve = ("--model", model, "--blocks", f"0:{NUM_BLOCKS}")
    servers = [nodes.start(host, *JOIN, *serve, peers=peers, port=PORT + number) for number in range(num)]
    for server in servers:
        nodes.wait_ready(server)
    for server in servers:
        server.wait_for("serving", 100)
    return servers


def await_servers(client: LabNode, model: Path, servers: Sequence[LabNode]) -> None:
    """Wait until the client sees all servers."""
    until = time.monotonic() + 30
    while set(client.tell("servers", model=model.name).result()) != {server.peer_id for server in servers}:
        assert time.monotonic() < until, "the client does not see the servers"
        time.sleep(0.2)
