"""Counts what a node sends and receives, and keeps its traffic within the owner's limits.

Payloads of calls and messages of streams are counted by peer, and by the kind of path to the peer; framing and
encryption are not counted. The path is the one at the last look at the connections (`note`); until the first look, all
traffic counts as direct.

A limit holds for all traffic together. Calls are small and never wait. They are charged, and streams wait for as long
as the calls have taken. Large messages go over streams. `rate.Turns` gives streams their turns to send.
`stream_buffers` reads no faster than `download` allows, so that the peer's own flow control slows the peer.

State belongs to the network's loop. It is bounded: beyond MAX_PEERS peers, those that have exchanged nothing for the
longest time are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from swarm_protocol.errors import ConfigError
from swarm_protocol.records import PathKind

from swarm.network.link_meter import LinkMeter
from swarm.network.rate import Allowance, Turns

PATH_KINDS: tuple[PathKind, ...] = get_args(PathKind)

MAX_PEERS = 4096
"""Maximum peers whose bytes are counted separately."""

MIN_BYTES_PER_S = 12_500
"""The smallest limit, 0.1 Mbit/s. With less, a node's records alone take a good part of its link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLimits:
    """The most bytes per second that a node sends and receives. Raises ConfigError below MIN_BYTES_PER_S."""

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for limit in (self.up_bytes_per_s, self.down_bytes_per_s):
            if not limit >= MIN_BYTES_PER_S:
                raise ConfigError(
                    f"a limit of {limit:g} bytes/s leaves a node no room for its records",
                    remedy=f"allow {MIN_BYTES_PER_S} bytes/s or more",
                )


NO_LIMITS = TrafficLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPath:
    """The kind of path to one connected peer, and the payload bytes exchanged with the peer over all its paths so
    far."""

    kind: PathKind
    sent_bytes: int
    received_bytes: int


@dataclass(slots=True)
class _PeerBytes:
    sent: int = 0
    received: int = 0


class Traffic:
    """The traffic of one node. `sent_bytes` and `received_bytes` are totals of all peers, by kind of path, and only
    grow.

    `links` measures the links from the messages of streams. Streams send in `turns`, which are charged to the upload,
    and are read no faster than `download` allows.
    """

    def __init__(self, limits: TrafficLimits = NO_LIMITS) -> None:
        self.limits = limits
        self.links = LinkMeter()
        self.turns = Turns(Allowance(limits.up_bytes_per_s))
        self.download = Allowance(limits.down_bytes_per_s)
        self.sent_bytes: dict[PathKind, int] = dict.fromkeys(PATH_KINDS, 0)
        self.received_bytes: dict[PathKind, int] = dict.fromkeys(PATH_KINDS, 0)
        self._relayed_bytes = 0
        self._kinds: Mapping[str, PathKind] = {}
        self._peers: dict[str, _PeerBytes] = {}  # in the order of their last exchange

    @property
    def up_bytes(self) -> int:
        """Return all payload bytes that were sent, including those that were relayed for others."""
        return sum(self.sent_bytes.values()) + self._relayed_bytes

    @property
    def down_bytes(self) -> int:
        """Return all payload bytes that were received, including those that were relayed for others."""
        return sum(self.received_bytes.values()) + self._relayed_bytes

    @property
    def total_bytes(self) -> int:
        """Return all payload bytes in both directions. Relayed bytes count twice, as received and as sent."""
        return self.up_bytes + self.down_bytes

    @property
    def num_connected(self) -> dict[PathKind, int]:
        """Return how many peers were connected at the last look, by kind of path."""
        kinds = list(self._kinds.values())
        return {kind: kinds.count(kind) for kind in PATH_KINDS}

    def note(self, kinds: Mapping[str, PathKind]) -> None:
        """Set the kinds of the paths to all connected peers, by peer id."""
        self._kinds = kinds

    def peer_paths(self) -> dict[str, PeerPath]:
        """Return the path to each peer that was connected at the last look, with the bytes exchanged."""
        unused = _PeerBytes()
        return {
            peer_id: PeerPath(kind=kind, sent_bytes=counted.sent, received_bytes=counted.received)
            for peer_id, kind in self._kinds.items()
            for counted in (self._peers.get(peer_id, unused),)
        }

    def sent(self, peer_id: str, num_bytes: int) -> None:
        """Count and charge the payload of a call, which is sent at once."""
        self.sent_in_turn(peer_id, num_bytes)
        self.turns.charge(num_bytes)

    def received(self, peer_id: str, num_bytes: int) -> None:
        """Count and charge the received payload of a call."""
        self.received_in_turn(peer_id, num_bytes)
        self.download.charge(num_bytes)

    def sent_in_turn(self, peer_id: str, num_bytes: int) -> None:
        """Count bytes of a stream, which `turns` charges when they are sent."""
        self.sent_bytes[self._kinds.get(peer_id, "direct")] += num_bytes
        self._counted(peer_id).sent += num_bytes

    def received_in_turn(self, peer_id: str, num_bytes: int) -> None:
        """Count bytes of a stream, which were charged when they were read."""
        self.received_bytes[self._kinds.get(peer_id, "direct")] += num_bytes
        self._counted(peer_id).received += num_bytes

    def relayed(self, num_bytes: int) -> None:
        """Count and charge bytes that this node passes from one peer to another."""
        self._relayed_bytes += num_bytes
        self.turns.charge(num_bytes)
        self.download.charge(num_bytes)

    def _counted(self, peer_id: str) -> _PeerBytes:
        counted = self._peers.pop(peer_id, None) or _PeerBytes()
        self._peers[peer_id] = counted
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        return counted
