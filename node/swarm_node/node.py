"""One running node, as its role, its status and its metrics see it.

`swarm_node.daemon` builds the node, and the daemon's task owns it. A role works with it and reports its activity in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.network.relay.relay import RelayCounts
from swarm.network.traffic import NO_LIMITS, PeerPath, TrafficLimits
from swarm_protocol import limits, records
from swarm_protocol.control_messages import (
    MAX_COUNT,
    MAX_HOURS,
    MAX_NOT_JOINED_CHARS,
    LimitStatus,
    PeerStatus,
    RelayStatus,
    ServingStatus,
    SpotCheckStatus,
    StatusReply,
    TrainingStatus,
)
from swarm_protocol.errors import PeerError, printable_line
from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord, PathCounts, Reachability
from swarm_protocol.version import PROTOCOL_VERSION, software_version

from swarm_node.events.emitter import Emitter
from swarm_node.lending.lending import Break, Lending
from swarm_node.lending.traffic_count import LinkUse
from swarm_node.machine.hardware import Hardware, resident_bytes
from swarm_node.metrics.metric_registry import Registry
from swarm_node.metrics.otel_traces import NO_TRACES, Traces
from swarm_node.settings.config import Config
from swarm_node.shutdown import Shutdown
from swarm_node.storage.home import Home

logger = logging.getLogger(__name__)

RTT_TIMEOUT_S = 2.0
"""Seconds for connected peers to answer. A slower round trip is measured at the next request."""

RelayUse = Literal["none", "serve", "use", "auto"]
RoleName: TypeAlias = records.Role


class NodeRole(ABC):
    """The work of a node on the network."""

    name: RoleName = ""
    """The role's name in the node's record, or "" for a role that other nodes need not know."""

    num_steps = 1
    """Numbered steps that the role reports after the daemon's four."""

    computes = False
    """True if the role computes, so that device and speed matter. Such a node loads torch, which takes seconds."""

    def relay(self, _config: Config) -> RelayUse:
        """Return whether the node relays for others, or may be reached through a relay."""
        return "none"

    def waiting(self) -> AbstractAsyncContextManager[object]:
        """Return a context in which the role tells its clients that the node has not joined its network yet."""
        return nullcontext()

    @abstractmethod
    async def run(self, node: Node) -> None:
        """Work until done. Once `node.work_end.leaving` is set, take nothing new, finish work in flight and return.

        It is cancelled if that takes too long, and called again after a break if only the lending hours had ended.
        """


class StartupSteps:
    """Numbers the steps of starting, to show progress."""

    def __init__(self, emitter: Emitter, num_steps: int) -> None:
        self._emitter = emitter
        self._num_steps = num_steps
        self._num_done = 0

    def expect(self, num_steps: int) -> None:
        """Announce that `num_steps` more steps follow."""
        self._num_steps = self._num_done + num_steps

    def done(self, title: str, detail: str) -> None:
        self._num_done += 1
        self._emitter.emit("step", number=self._num_done, of=self._num_steps, title=title, detail=detail)


@dataclass(slots=True, kw_only=True)
class Activity:
    """The current activity. The role writes it, and `status` reads it."""

    state: str = "starting"
    training: TrainingStatus | None = None
    serving: ServingStatus | None = None
    waits: Callable[[TrainingStatus], TrainingStatus] = lambda training: training
    """Set by a trainer: adds what it waits for, and other facts about its run."""
    first_token_s: Callable[[], tuple[float, float] | tuple[None, None]] = lambda: (None, None)
    """Set by a gateway: how many seconds recent requests waited for their first token, as median and 95th
    percentile."""
    spot_checks: Callable[[], SpotCheckStatus | None] = lambda: None
    """Set by a gateway: what its spot checks have found."""
    convicted_servers: Callable[[], tuple[str, ...]] = tuple
    """Set by a node that serves or uses models: one line for each server that evidence convicts."""


@dataclass(slots=True, kw_only=True)
class Node:
    """One node, from the moment it is on the network until it leaves.

    `shutdown` is the request to leave. `work_end` is the request to end the current work: at the end of a shift, or the
    same object as `shutdown` if the node always lends.
    """

    config: Config
    home: Home
    identity: Identity
    emitter: Emitter
    shutdown: Shutdown
    hardware: Hardware
    network: Network
    membership: Membership
    steps: StartupSteps
    lending: Lending
    link_use: LinkUse
    limits: TrafficLimits = NO_LIMITS
    role: RoleName = ""
    reachability: Reachability = "unknown"
    activity: Activity = field(default_factory=Activity)
    metrics: Registry = field(default_factory=Registry)
    traces: Traces = NO_TRACES
    num_peers: int = 1
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of the nodes seen last, by peer id."""
    peer_paths: Callable[[], Mapping[str, PeerPath]] = dict
    """Returns the connected peers with the path to each."""
    relay_counts: Callable[[], RelayCounts | None] = lambda: None
    """Returns what this node relays for others, or None while it does not relay."""
    started_at: float = field(default_factory=time.time)
    work_end: Shutdown = field(init=False)

    def __post_init__(self) -> None:
        self.work_end = self.shutdown

    @property
    def break_now(self) -> Break | None:
        """Return the node's current break, or None if it lends."""
        return self.lending.break_at(time.time())

    async def announce(self) -> None:
        """Publish what this node is now. Call it again after each change. Membership adds the node's models and runs.

        While the network cannot tell where the node listens, the earlier record stays.
        """
        try:
            addrs = await self.network.addrs()
        except PeerError as error:
            logger.warning("this node's record is not published yet: %s", error)
            return
        speeds = self.hardware.speeds
        free_bytes, _ = self.hardware.read_memory()
        first_token_p50_s, first_token_p95_s = self.activity.first_token_s()
        record = NodeRecord(
            name=self.config.name,
            version=software_version(),
            addrs=addrs[: limits.MAX_ADDRS],
            device=self.hardware.device_name,
            memory_bytes=self.hardware.memory_bytes,
            free_memory_bytes=min(free_bytes, self.hardware.memory_bytes),
            reachability=self.reachability,
            prefill_tokens_per_s=speeds.prefill_tokens_per_s,
            decode_tokens_per_s=speeds.decode_tokens_per_s,
            training_tokens_per_s=speeds.training_tokens_per_s,
            started_at=self.started_at,
            state="leaving" if self.shutdown.leaving.is_set() else "alive",
            role=self.role,
            first_token_p50_s=first_token_p50_s,
            first_token_p95_s=first_token_p95_s,
            **self._rest(),
            paths=count_paths(self.peer_paths()),
            protocol_version=PROTOCOL_VERSION,
        )
        self.membership.announce(record)

    async def status(self) -> StatusReply:
        lending, paths = self.lending, self.peer_paths()
        return StatusReply(
            peer_id=self.network.peer_id,
            name=self.config.name,
            version=software_version(),
            pid=os.getpid(),
            uptime_s=max(0.0, time.time() - self.started_at),
            network_id=self.network.network_id,
            addrs=(await self.network.addrs())[: limits.MAX_CONTROL_ADDRS],
            reachability=self.reachability,
            num_peers=self.num_peers,
            state="draining" if self.work_end.leaving.is_set() else self.activity.state,
            training=self.activity.waits(self.activity.training) if self.activity.training else None,
            serving=self.activity.serving,
            memory_bytes=resident_bytes(),
            **self._rest(),
            month_bytes=lending.month.num_bytes if lending.budget_bytes else 0,
            month_budget_bytes=lending.budget_bytes,
            paths=count_paths(paths),
            peers=await list_peers(paths, self.membership, self.names),
            relaying=relay_status(self.relay_counts()),
            limits=self._limit_status(),
            spot_checks=self.activity.spot_checks(),
            convicted_servers=self.activity.convicted_servers(),
            protocol_version=PROTOCOL_VERSION,
        )

    def _rest(self) -> dict[str, Any]:
        """Return why this node lends nothing now, and until when, as its record and its status say it."""
        rest = self.break_now
        return {"pause": rest.pause, "lends_again_at": rest.until} if rest else {}

    def _limit_status(self) -> LimitStatus:
        config, now_s = self.config, asyncio.get_running_loop().time()
        up_bytes_per_s, down_bytes_per_s = self.link_use.bytes_per_s(now_s)
        return LimitStatus(
            max_upload_bytes_per_s=config.max_upload,
            max_download_bytes_per_s=config.max_download,
            upload_bytes_per_s=up_bytes_per_s,
            download_bytes_per_s=down_bytes_per_s,
            hours=tuple(dict.fromkeys(map(str, config.hours)))[:MAX_HOURS],
        )


def starting_status(config: Config, peer_id: str, uptime_s: float, not_joined: str) -> StatusReply:
    """Return the status of a daemon that has not joined its network yet, for the reason `not_joined`."""
    return StatusReply(
        peer_id=peer_id,
        name=config.name,
        version=software_version(),
        pid=os.getpid(),
        uptime_s=uptime_s,
        network_id=config.network_id,
        addrs=(),
        reachability="unknown",
        num_peers=0,
        state="starting",
        training=None,
        serving=None,
        memory_bytes=resident_bytes(),
        not_joined=printable_line(not_joined)[:MAX_NOT_JOINED_CHARS],
        protocol_version=PROTOCOL_VERSION,
    )


def count_paths(paths: Mapping[str, PeerPath]) -> PathCounts:
    """Return the number of peers for each kind of path."""
    counts = Counter(path.kind for path in paths.values())
    return PathCounts(
        direct=counts["direct"],
        dialled_back=counts["dialled back"],
        punched=counts["punched"],
        relayed=counts["relayed"],
    )


async def list_peers(
    paths: Mapping[str, PeerPath], membership: Membership, names: Mapping[str, str]
) -> tuple[PeerStatus, ...]:
    """Return the MAX_CONTROL_PEERS peers of `paths` with the most bytes, in descending order.

    Round trips that were not measured recently are measured now, of a few peers at once. `names` are by peer id.
    """
    busiest = sorted(paths, key=lambda peer_id: -(paths[peer_id].sent_bytes + paths[peer_id].received_bytes))
    listed = busiest[: limits.MAX_CONTROL_PEERS]
    rtts_ms = await membership.rtts_ms(listed, max_peers=len(listed), timeout_s=RTT_TIMEOUT_S)
    return tuple(
        PeerStatus(
            peer_id=peer_id,
            name=names.get(peer_id, ""),
            path=paths[peer_id].kind,
            rtt_ms=min(rtts_ms[peer_id], limits.MAX_RTT_MS) if peer_id in rtts_ms else None,
            sent_bytes=paths[peer_id].sent_bytes,
            received_bytes=paths[peer_id].received_bytes,
        )
        for peer_id in listed
    )


def relay_status(counts: RelayCounts | None) -> RelayStatus | None:
    """Return what a node relays for others, or None if it does not relay."""
    if counts is None:
        return None
    return RelayStatus(
        num_reservations=counts.reservations,
        num_circuits=counts.circuits,
        relayed_bytes=counts.relayed_bytes,
        num_refused=min(sum(counts.refusals.values()) - counts.refusals["idle"], MAX_COUNT),
        throttled_s=min(counts.throttled_s, limits.MAX_TIME_S),
    )
