"""Examples of messages of the serving calls beside sessions."""

from __future__ import annotations

from swarm_protocol.rows import Rows
from swarm_protocol.serving_messages import Compute, FilesRequest, FilesResponse, TensorPiece

EXAMPLES: tuple[object, ...] = (
    FilesRequest(model="stdlib-1m"),
    FilesResponse(revision="1f00ba44", files={"config.json": b"{}", "tokenizer.json": b""}),
    Compute(
        revision="0e9e39f2",
        start=4,
        end=8,
        num_sequences=2,
        num_positions=100,
        of_tokens=False,
        head=True,
        codec="bf16",
        deadline_s=12.5,
    ),
    Compute(
        revision="0e9e39f2",
        start=0,
        end=0,
        num_sequences=1,
        num_positions=7,
        of_tokens=True,
        head=False,
        codec="raw",
        deadline_s=60.0,
    ),
    Compute(
        revision="0e9e39f2",
        start=4,
        end=8,
        num_sequences=1,
        num_positions=100,
        of_tokens=False,
        head=True,
        codec="raw",
        deadline_s=12.5,
        num_top=64,
        num_last=20,
        temperature=0.75,
        has_targets=True,
    ),
    TensorPiece(rows=Rows(codec="raw", num_rows=2, num_columns=3, payload=bytes(range(24)))),
    TensorPiece(rows=Rows(codec="tokens", num_rows=2, num_columns=0, payload=bytes(8))),
)
