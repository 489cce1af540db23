"""What clients ask servers of a model for before a session."""

from __future__ import annotations

from swarm_protocol.serving_messages import FilesRequest, FilesResponse

EXAMPLES: tuple[object, ...] = (
    FilesRequest(model="stdlib-1m"),
    FilesResponse(revision="1f00ba44", files={"config.json": b"{}", "tokenizer.json": b""}),
)
