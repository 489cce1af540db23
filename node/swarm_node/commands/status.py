"""`swarm-node status`: what the daemon of this home is doing."""

from __future__ import annotations

from dataclasses import asdict

from swarm_protocol.control_messages import ServingStatus, StatusReply, TrainingStatus

from swarm_node.command_options import Flags
from swarm_node.control import ControlClient
from swarm_node.events import Emitter
from swarm_node.formatting import duration
from swarm_node.home import Home
from swarm_node.reach import reach


def status(flags: Flags) -> int:
    reply = ControlClient(Home(flags.home())).status()
    emitter = Emitter(json=flags.json)
    if flags.json:
        emitter.emit("status", **{**asdict(reply), "reachability": reach(reply.reachability, reply.addrs)})
    else:
        emitter.result(text(reply))
    return 0


def text(reply: StatusReply) -> str:
    """One line a fact, for a terminal."""
    lines = {
        "node": f"{reply.name}  {reply.peer_id}",
        "state": f"{reply.state}, up {duration(reply.uptime_s)}",
        "training": _training(reply.training) if reply.training else "",
        "serving": _serving(reply.serving) if reply.serving else "",
        "network": _network(reply),
        "address": "\n           ".join(reply.addrs) or "none yet",
        "process": f"pid {reply.pid}, {reply.memory_bytes / 2**20:.0f} MiB, version {reply.version}",
    }
    return "\n".join(f"{title:<10} {line}" for title, line in lines.items() if line)


def _network(reply: StatusReply) -> str:
    nodes = "1 node" if reply.num_peers == 1 else f"{reply.num_peers} nodes"
    return f"{reply.network_id}, {nodes} live, reachability {reach(reply.reachability, reply.addrs)}"


def _training(training: TrainingStatus) -> str:
    loss = "" if training.loss is None else f", loss {training.loss:.3f}"
    step = f"outer step {training.outer_step} of {training.num_outer_steps}"
    # below a second it is between two intervals, as in every round
    waits = training.waits_for and training.waits_s >= 1
    waiting = f"waits for {training.waits_for} since {duration(training.waits_s)}"
    return f"{training.run}, {step}{loss}, {waiting if waits else f'{training.tokens_per_s:.0f} tokens/s here'}"


def _serving(serving: ServingStatus) -> str:
    blocks = f"blocks {serving.start}:{serving.end} of {serving.model}"
    return f"{blocks}, {serving.num_sessions} sessions, {serving.tokens_per_s:.1f} tokens/s"
