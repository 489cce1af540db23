"""A daemon's status as event fields and as lines for people."""

from __future__ import annotations

from dataclasses import asdict

from swarm_protocol.control_messages import ServingStatus, StatusReply, TrainingStatus


def fields(reply: StatusReply) -> dict[str, object]:
    """The fields of the `status` event."""
    return asdict(reply)


def text(reply: StatusReply) -> str:
    """One line a fact, for a terminal."""
    lines = {
        "node": f"{reply.name}  {reply.peer_id}",
        "state": f"{reply.state}, up {_duration(reply.uptime_s)}",
        "training": _training(reply.training) if reply.training else "",
        "serving": _serving(reply.serving) if reply.serving else "",
        "network": f"{reply.network_id}, {reply.num_peers} nodes live, reachability {reply.reachability}",
        "address": "\n           ".join(reply.addrs) or "none yet",
        "process": f"pid {reply.pid}, {reply.memory_bytes / 2**20:.0f} MiB, version {reply.version}",
    }
    return "\n".join(f"{title:<10} {line}" for title, line in lines.items() if line)


def _training(training: TrainingStatus) -> str:
    loss = "" if training.loss is None else f", loss {training.loss:.3f}"
    step = f"outer step {training.outer_step} of {training.num_outer_steps}"
    return f"{training.run}, {step}{loss}, {training.tokens_per_s:.0f} tokens/s"


def _serving(serving: ServingStatus) -> str:
    blocks = f"blocks {serving.start} to {serving.end} of {serving.model}"
    return f"{blocks}, {serving.num_sessions} sessions, {serving.tokens_per_s:.1f} tokens/s"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
