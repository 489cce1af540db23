"""Messages between a node's daemon and its commands (`status`, `drain`, `stop`).

They run as the same user on the same machine, but perhaps in different versions, so these are checked like anything
else that is read. The socket is `swarm_node.control`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_addr, check_choice, check_count, check_float, check_int, check_name, check_text
from swarm_protocol.identity import check_peer_id
from swarm_protocol.proto import control_pb2
from swarm_protocol.version import check_network_id

STATES = ("starting", "seeding", "idle", "training", "serving", "gateway", "dashboard", "draining")
REACHABILITIES = ("public", "relay", "unknown")
_MAX_PID = 2**32 - 1
_MAX_WAITS_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    def to_bytes(self) -> bytes:
        return wire.encode(control_pb2.StatusRequest())

    @classmethod
    def from_bytes(cls, data: bytes) -> StatusRequest:
        return wire.decode(data, control_pb2.StatusRequest, wire.flat(cls), max_bytes=limits.MAX_CONTROL_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """`loss` is of this node's last interval, None before the first. Since its interval ended, `waits_s` ago, it
    `waits_for` that, in words; empty: it trains."""

    run: str
    outer_step: int
    num_outer_steps: int
    loss: float | None = None
    tokens_per_s: float = 0.0
    waits_for: str = ""
    waits_s: float = 0.0

    def __post_init__(self) -> None:
        check_name(self.run, "run")
        check_int(self.outer_step, "outer_step", high=limits.MAX_OUTER_STEP)
        check_int(self.num_outer_steps, "num_outer_steps", high=limits.MAX_OUTER_STEP)
        if self.loss is not None:
            check_float(self.loss, "loss", high=limits.MAX_LOSS)
        check_float(self.tokens_per_s, "tokens_per_s", high=limits.MAX_TOKENS_PER_S)
        check_text(self.waits_for, "waits_for", max_chars=_MAX_WAITS_CHARS)
        check_float(self.waits_s, "waits_s", high=limits.MAX_TIME_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStatus:
    """The span `[start, end)`, the sessions open on it, and tokens computed a second over the last few seconds."""

    model: str
    start: int
    end: int
    num_sessions: int = 0
    tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        check_name(self.model, "model")
        check_int(self.end, "end", low=1, high=limits.MAX_BLOCKS)
        check_int(self.start, "start", high=self.end - 1)
        check_int(self.num_sessions, "num_sessions", high=limits.MAX_QUEUE_DEPTH)
        check_float(self.tokens_per_s, "tokens_per_s", high=limits.MAX_TOKENS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReply:
    """`num_peers` counts the live nodes that it sees, itself included."""

    peer_id: str
    name: str
    version: str
    pid: int
    uptime_s: float
    network_id: str
    addrs: tuple[str, ...]
    reachability: str
    num_peers: int
    state: str
    training: TrainingStatus | None
    serving: ServingStatus | None
    memory_bytes: int

    def __post_init__(self) -> None:
        check_peer_id(self.peer_id)
        check_text(self.name, "name", max_chars=limits.MAX_NODE_NAME_CHARS)
        check_text(self.version, "version", max_chars=limits.MAX_VERSION_CHARS)
        check_int(self.pid, "pid", high=_MAX_PID)
        check_float(self.uptime_s, "uptime_s", high=limits.MAX_TIME_S)
        check_network_id(self.network_id)
        check_count(self.addrs, "addrs", max_items=limits.MAX_CONTROL_ADDRS)
        for addr in self.addrs:
            check_addr(addr, "addrs")
        check_choice(self.reachability, "reachability", REACHABILITIES)
        check_int(self.num_peers, "num_peers", high=2**32 - 1)
        check_choice(self.state, "state", STATES)
        check_int(self.memory_bytes, "memory_bytes", high=limits.MAX_MEMORY_BYTES)

    def to_bytes(self) -> bytes:
        message = control_pb2.StatusReply(
            **{name: getattr(self, name) for name in _STATUS_SCALARS},
            training=None if self.training is None else wire.fill(control_pb2.TrainingStatus, self.training),
            serving=None if self.serving is None else wire.fill(control_pb2.ServingStatus, self.serving),
        )
        return wire.encode(message)

    @classmethod
    def from_bytes(cls, data: bytes) -> StatusReply:
        """Raises PeerViolation."""
        return wire.decode(data, control_pb2.StatusReply, _build_status, max_bytes=limits.MAX_CONTROL_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    """Asks the daemon to leave; with `drain` what is in flight gets its time to finish."""

    drain: bool

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(control_pb2.LeaveRequest, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaveRequest:
        """Raises PeerViolation."""
        return wire.decode(data, control_pb2.LeaveRequest, wire.flat(cls), max_bytes=limits.MAX_CONTROL_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveReply:
    """It will be gone within `seconds`."""

    pid: int
    seconds: float

    def __post_init__(self) -> None:
        check_int(self.pid, "pid", high=_MAX_PID)
        check_float(self.seconds, "seconds", high=limits.MAX_TIME_S)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(control_pb2.LeaveReply, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaveReply:
        """Raises PeerViolation."""
        return wire.decode(data, control_pb2.LeaveReply, wire.flat(cls), max_bytes=limits.MAX_CONTROL_BYTES)


_STATUS_SCALARS = tuple(
    field.name for field in control_pb2.StatusReply.DESCRIPTOR.fields if field.name not in {"training", "serving"}
)


def _build_status(message: Any) -> StatusReply:
    scalars = {name: getattr(message, name) for name in _STATUS_SCALARS} | {"addrs": tuple(message.addrs)}
    training = wire.flat(TrainingStatus)(message.training) if message.HasField("training") else None
    serving = wire.flat(ServingStatus)(message.serving) if message.HasField("serving") else None
    return StatusReply(**scalars, training=training, serving=serving)
