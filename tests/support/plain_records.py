"""Records with nothing special about them, to be changed where a test needs it."""

from __future__ import annotations

from dataclasses import replace

from swarm_protocol.records import NodeRecord, ServeRecord


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


def serve_record(start: int = 0, end: int = 4, **changes: object) -> ServeRecord:
    """Return the record of a server of these blocks, of four."""
    record = ServeRecord(
        model="tiny",
        revision="r1",
        num_blocks=4,
        start=0,
        end=4,
        state="serving",
        prefill_ms_per_token=1.0,
        decode_ms_per_block=1.0,
        free_kv_tokens=1000,
    )
    return replace(record, start=start, end=end, **changes)  # type: ignore[arg-type]
