"""What a server of a model's blocks tells: steps as they are computed, and the rest when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from swarm.serving.server.span_volunteer import Volunteer

from swarm_node.metrics.metric_registry import Reading, Registry


class ServerMetrics:
    """Give `step` to the server as its options' `on_step`. One at a time in a registry, made once."""

    def __init__(self, registry: Registry) -> None:
        seconds = registry.histogram("swarm_server_step_seconds")
        self._prompt_tokens = registry.counter("swarm_server_prompt_tokens_total")
        self._generation_tokens = registry.counter("swarm_server_generation_tokens_total")
        # found here and not at each step, which would cost more than all else
        self._prompt = [seconds.labels(phase, "prompt") for phase in ("compute", "queue")]
        self._generation = [seconds.labels(phase, "generation") for phase in ("compute", "queue")]

    def step(self, num_positions: int, compute_ms: float, queue_ms: float) -> None:
        if num_positions == 1:
            self._generation_tokens.inc()
            compute, queue = self._generation
        else:
            self._prompt_tokens.inc(num_positions)
            compute, queue = self._prompt
        compute.observe(compute_ms / 1000)
        queue.observe(queue_ms / 1000)


def read_server(volunteer: Volunteer) -> Iterator[Reading]:
    """Nothing before the first blocks are served, nor while they are exchanged for others."""
    yield Reading("swarm_server_move_failures_total", volunteer.num_failed_moves)
    server = volunteer.server
    if server is None:
        return
    for reason, number in server.lanes.num_refused.items():
        yield Reading("swarm_server_refusals_total", number, {"reason": reason})
    yield Reading("swarm_server_num_sessions", len(server.sessions))
    yield Reading("swarm_server_num_lanes", server.lanes.num_lanes)
    yield Reading("swarm_server_backlog_bytes", server.lanes.backlog.num_bytes)
    yield Reading("swarm_server_start_block", server.start_block)
    yield Reading("swarm_server_end_block", server.end_block)
    load = server.load
    yield Reading("swarm_server_num_requests_running", load.num_running)
    yield Reading("swarm_server_num_requests_waiting", load.num_waiting)
    yield Reading("swarm_server_kv_cache_usage_perc", load.cache_usage)
