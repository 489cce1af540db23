"""The one traffic meter of a node: what it sends and receives, counted, and kept within the limits of its owner.

Payloads of calls and messages of streams are counted by peer, and by the path over which the peer is reached; framing
and encryption come on top. The path is the one of the last look at the connections (`note`): what passed before the
first look counts as direct.

A limit holds for all traffic together. Calls are small, others wait for them, and they never wait: they are charged,
and streams wait for as long as they have taken. What is large goes over streams: `rate.Turns` gives these their
turns to send, `stream_buffers` reads no faster than `download` allows, so that the peer's own flow control slows it.

State belongs to the network's loop. It is bounded: of more than MAX_PEERS peers, those that have exchanged nothing for
the longest time are forgotten.
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
"""Maximum peers whose bytes are counted apart."""

MIN_BYTES_PER_S = 12_500
"""0.1 Mbit/s: below this the records of a node alone take a good part of its link."""


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
    """The path to one connected peer, and the payload bytes exchanged with it, over earlier paths too."""

    kind: PathKind
    sent_bytes: int
    received_bytes: int


@dataclass(slots=True)
class _PeerBytes:
    sent: int = 0
    received: int = 0


class Traffic:
    """`sent_bytes` and `received_bytes` of all peers only grow, by the path over which they went.

    `links` is told of each message of a stream. Streams send in `turns`, which are charged to the upload, and are read
    no faster than `download` allows.
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
        self._peers: dict[str, _PeerBytes] = {}  # the one that exchanged something last is at the end

    @property
    def up_bytes(self) -> int:
        """Return all payload bytes that were sent, those that were relayed for others included."""
        return sum(self.sent_bytes.values()) + self._relayed_bytes

    @property
    def down_bytes(self) -> int:
        """Return all payload bytes that were received, likewise."""
        return sum(self.received_bytes.values()) + self._relayed_bytes

    @property
    def total_bytes(self) -> int:
        """Return all payload bytes, both ways. What is relayed for others comes in and goes out."""
        return self.up_bytes + self.down_bytes

    @property
    def num_connected(self) -> dict[PathKind, int]:
        """Return how many peers were connected at the last look, by the path to them."""
        kinds = list(self._kinds.values())
        return {kind: kinds.count(kind) for kind in PATH_KINDS}

    def note(self, kinds: Mapping[str, PathKind]) -> None:
        """Take `kinds` as the paths to all connected peers, by peer id."""
        self._kinds = kinds

    def peer_paths(self) -> dict[str, PeerPath]:
        """Return the path to each peer that was connected at the last look, with its bytes."""
        unused = _PeerBytes()
        return {
            peer_id: PeerPath(kind=kind, sent_bytes=counted.sent, received_bytes=counted.received)
            for peer_id, kind in self._kinds.items()
            for counted in (self._peers.get(peer_id, unused),)
        }

    def sent(self, peer_id: str, num_bytes: int) -> None:
        """Count and charge the payload of a call, which leaves at once."""
        self.sent_in_turn(peer_id, num_bytes)
        self.turns.charge(num_bytes)

    def received(self, peer_id: str, num_bytes: int) -> None:
        """Count and charge the payload of a call."""
        self.received_in_turn(peer_id, num_bytes)
        self.download.charge(num_bytes)

    def sent_in_turn(self, peer_id: str, num_bytes: int) -> None:
        """Count bytes that are charged when they leave."""
        self.sent_bytes[self._kinds.get(peer_id, "direct")] += num_bytes
        self._counted(peer_id).sent += num_bytes

    def received_in_turn(self, peer_id: str, num_bytes: int) -> None:
        """Count bytes that were charged as they were read."""
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
