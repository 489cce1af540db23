"""One or more of each message between clients and servers of a model."""

from __future__ import annotations

from swarm_protocol.serving_messages import FilesRequest, FilesResponse, Open, Ready, Step, StepResult, TensorBytes

EXAMPLES: tuple[object, ...] = (
    Open(session_id="s-1", model="stdlib-1m", revision="1f00ba44", start=0, end=4, max_tokens=256),
    Ready(max_step_tokens=512),
    Step(position=0, want="nothing", tensor=TensorBytes(dtype="int64", shape=(3,), payload=bytes(range(24)))),
    Step(
        position=7,
        want="last",
        tensor=TensorBytes(dtype="float32", shape=(2, 3), payload=bytes(range(24))),
    ),
    StepResult(position=3, compute_ms=1.5, queue_ms=0.0),
    StepResult(
        position=4,
        compute_ms=1.5,
        queue_ms=0.25,
        leave_within_s=30.0,
        tensor=TensorBytes(dtype="float32", shape=(1, 4), payload=bytes(range(16))),
    ),
    FilesRequest(model="stdlib-1m"),
    FilesResponse(revision="1f00ba44", files={"config.json": b"{}", "tokenizer.json": b""}),
)
