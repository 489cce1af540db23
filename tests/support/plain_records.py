"""A record with nothing special about it, to be changed where a test needs it."""

from __future__ import annotations

from dataclasses import replace

from swarm_protocol.records import NodeRecord


def node_record(name: str = "node", **changes: object) -> NodeRecord:
    record = NodeRecord(
        name=name,
        version="1",
        addrs=(),
        device="cpu",
        memory_bytes=8,
        free_memory_bytes=4,
        reachability="public",
        started_at=1.0,
    )
    return replace(record, **changes)  # type: ignore[arg-type]
