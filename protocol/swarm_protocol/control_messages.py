"""Defines the messages between a node's daemon and its commands (`status`, `drain`, `stop`).

Both run as the same user on the same machine, but perhaps in different versions, so the messages are checked like all
other input. `swarm_node.control` owns the socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import Addr, Checked, Name, check_int, distinct, number, one_line, one_of, whole
from swarm_protocol.identity import PeerId
from swarm_protocol.proto import control_pb2
from swarm_protocol.records import Moment, OuterStep, PathCounts, PathKind, Pause, Reachability, TokensPerS
from swarm_protocol.training_messages import StepsLeft
from swarm_protocol.version import KnownProtocol, NetworkId

STATES = ("starting", "seeding", "idle", "training", "serving", "gateway", "dashboard", "draining", "paused")
Pid: TypeAlias = Annotated[int, whole(2**32 - 1)]
MAX_COUNT = 2**32 - 1
Count: TypeAlias = Annotated[int, whole(MAX_COUNT)]
Seconds: TypeAlias = Annotated[float, number(limits.MAX_TIME_S)]
_MAX_WAITS_CHARS = 200
_MAX_HOURS_CHARS = 32
TrafficBytes: TypeAlias = Annotated[int, whole(limits.MAX_TRAFFIC_BYTES)]
MAX_SLOW_LINKS = 8
MAX_HOURS = 64
HoursLine: TypeAlias = Annotated[str, one_line(_MAX_HOURS_CHARS, empty=False)]
MAX_CONVICTED_LINES = 8
MAX_NOT_JOINED_CHARS = 500
MAX_BARRED = 8
RunLine: TypeAlias = Annotated[str, one_line(_MAX_WAITS_CHARS, empty=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest(wire.WireMessage):
    """Asks a node for its status over the control socket."""

    PROTO = control_pb2.StatusRequest
    MAX_BYTES = limits.MAX_CONTROL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus(Checked):
    """The status of a node that trains. `loss` is that of this node's last interval, None before the first. `waits_for`
    is a text that says for what the node has waited since its interval ended, `waits_s` ago; empty: it trains.
    `slow_links` are lines about slow links of the run, and `convicted` about convicted members and their lies.

    While this node is on probation, it has `steps_left` of the run's `probation_steps`. `endorsed_step` is the newest
    outer step that the run's author has endorsed, as this node has verified (0: it knows none). `endorses_other` is set
    if this node's history has another state of that step. `entered` says in words by which invitation or vouches this
    node entered the run, according to the run's state; empty: by none. `held_out` says in words how members' work
    scores on held-out data; empty: there are no scores. `other_history` says in words who shows another history of the
    run than this node follows; empty: nobody that it knows.
    """

    run: Name
    outer_step: OuterStep
    num_outer_steps: OuterStep
    loss: Annotated[float, number(limits.MAX_LOSS)] | None = None
    tokens_per_s: TokensPerS = 0.0
    waits_for: Annotated[str, one_line(_MAX_WAITS_CHARS)] = ""
    waits_s: Seconds = 0.0
    slow_links: Annotated[tuple[RunLine, ...], distinct(MAX_SLOW_LINKS)] = ()
    convicted: Annotated[tuple[RunLine, ...], distinct(MAX_CONVICTED_LINES)] = ()
    steps_left: StepsLeft = 0
    probation_steps: StepsLeft = 0
    endorsed_step: OuterStep = 0
    endorses_other: bool = False
    entered: Annotated[str, one_line(_MAX_WAITS_CHARS)] = ""
    held_out: Annotated[str, one_line(_MAX_WAITS_CHARS)] = ""
    other_history: Annotated[str, one_line(_MAX_WAITS_CHARS)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStatus(Checked):
    """The span `[start, end)`, the sessions open on it, and tokens computed a second over the last few seconds."""

    model: Name
    start: int
    end: Annotated[int, whole(limits.MAX_BLOCKS, low=1)]
    num_sessions: Annotated[int, whole(limits.MAX_QUEUE_DEPTH)] = 0
    tokens_per_s: TokensPerS = 0.0

    def __post_init__(self) -> None:
        check_int(self.start, "start", high=self.end - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus(Checked):
    """One connected peer: its name, if its record is known, the path and the round trip to it, and the payload bytes
    exchanged with it. `rtt_ms` is None if it was not measured."""

    peer_id: PeerId
    name: Annotated[str, one_line(limits.MAX_NODE_NAME_CHARS)] = ""
    path: PathKind
    rtt_ms: Annotated[float, number(limits.MAX_RTT_MS)] | None = None
    sent_bytes: TrafficBytes = 0
    received_bytes: TrafficBytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus(Checked):
    """The relaying of a node for others: places and connections now, and since its start the bytes, the requests that
    were refused or failed, and the total time that circuits have waited for their share of its rate."""

    num_reservations: Count = 0
    num_circuits: Count = 0
    relayed_bytes: TrafficBytes = 0
    num_refused: Count = 0
    throttled_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitStatus(Checked):
    """The limits that the node's operator has set on link and hours, and the node's use of the link in bytes per second
    over the last seconds, including what the wire adds. 0 is no limit; without `hours`, such as 22:00-07:00, the node
    always lends."""

    max_upload_bytes_per_s: TrafficBytes = 0
    max_download_bytes_per_s: TrafficBytes = 0
    upload_bytes_per_s: Annotated[float, number(limits.MAX_TRAFFIC_BYTES)] = 0.0
    download_bytes_per_s: Annotated[float, number(limits.MAX_TRAFFIC_BYTES)] = 0.0
    hours: Annotated[tuple[HoursLine, ...], distinct(MAX_HOURS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotCheckStatus(Checked):
    """The number of spans of a gateway's answers that were checked since its start, by result, and the servers, at most
    MAX_BARRED, that it does not use because they were proved to have lied."""

    num_passed: Count = 0
    num_failed: Count = 0
    num_disputed: Count = 0
    num_unchecked: Count = 0
    barred: Annotated[tuple[PeerId, ...], distinct(MAX_BARRED)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReply(wire.WireMessage):
    """The status of a node. `num_peers` counts the live nodes that it sees, itself included. `pause` and
    `lends_again_at` are those of its record. `month_bytes` is its traffic in this calendar month, of
    `month_budget_bytes`; both are 0 without a budget. `paths` counts all connected peers, None if its version does not
    say; `peers` are those with the most bytes. `spot_checks` is None for a node that checks no answers, `relaying`
    while it does not relay, and `limits` if its version does not say. `convicted_servers` are lines about the newest
    convicted servers. `not_joined` is the reason why a node that is being started has not joined its network yet."""

    PROTO = control_pb2.StatusReply
    MAX_BYTES = limits.MAX_CONTROL_BYTES

    peer_id: PeerId
    name: Annotated[str, one_line(limits.MAX_NODE_NAME_CHARS)]
    version: Annotated[str, one_line(limits.MAX_VERSION_CHARS)]
    pid: Pid
    uptime_s: Seconds
    network_id: NetworkId
    addrs: Annotated[tuple[Addr, ...], distinct(limits.MAX_CONTROL_ADDRS)]
    reachability: Reachability
    num_peers: Count
    state: Annotated[str, one_of(STATES)]
    training: TrainingStatus | None
    serving: ServingStatus | None
    memory_bytes: Annotated[int, whole(limits.MAX_MEMORY_BYTES)]
    pause: Pause = ""
    lends_again_at: Moment | None = None
    month_bytes: TrafficBytes = 0
    month_budget_bytes: TrafficBytes = 0
    paths: PathCounts | None = None
    peers: Annotated[tuple[PeerStatus, ...], distinct(limits.MAX_CONTROL_PEERS)] = ()
    relaying: RelayStatus | None = None
    limits: LimitStatus | None = None
    spot_checks: SpotCheckStatus | None = None
    convicted_servers: Annotated[tuple[RunLine, ...], distinct(MAX_CONVICTED_LINES)] = ()
    not_joined: Annotated[str, one_line(MAX_NOT_JOINED_CHARS)] = ""
    protocol_version: KnownProtocol = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest(wire.WireMessage):
    """Asks the daemon to leave. With `drain`, work in flight gets time to finish."""

    PROTO = control_pb2.LeaveRequest
    MAX_BYTES = limits.MAX_CONTROL_BYTES

    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveReply(wire.WireMessage):
    """The answer to a LeaveRequest: the daemon will be gone within `seconds`."""

    PROTO = control_pb2.LeaveReply
    MAX_BYTES = limits.MAX_CONTROL_BYTES

    pid: Pid
    seconds: Seconds
