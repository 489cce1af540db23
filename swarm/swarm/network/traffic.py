"""The one traffic meter of a node: what it sends and receives, counted, and kept within the limits of its owner.

Payloads of calls and messages of streams are counted, apart for peers reached directly and through a relay; framing
and encryption come on top. A peer is `relayed` while all connections to it lead through relays, as of the last look at
them (`note`): what passed before the first look counts as direct.

A limit holds for all traffic together. Calls are small, others wait for them, and they never wait: they are charged,
and streams wait for as long as they have taken. What is large goes over streams: `paced_writer` gives these their
turns to send, `stream_buffers` reads no faster than `download` allows, so that the peer's own flow control slows it.

State belongs to the network's loop; nothing in it grows with what peers do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from swarm_protocol.errors import ConfigError

from swarm.network.allowance import Allowance
from swarm.network.paced_writer import Turns

PeerClass = Literal["direct", "relayed"]
PEER_CLASSES: tuple[PeerClass, ...] = ("direct", "relayed")

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


class Traffic:
    """`sent_bytes` and `received_bytes` only grow; `num_connected` are the peers of the last look.

    Streams send in `turns`, which are charged to the upload, and are read no faster than `download` allows.
    """

    def __init__(self, limits: TrafficLimits = NO_LIMITS) -> None:
        self.limits = limits
        self.turns = Turns(Allowance(limits.up_bytes_per_s))
        self.download = Allowance(limits.down_bytes_per_s)
        self.sent_bytes: dict[PeerClass, int] = dict.fromkeys(PEER_CLASSES, 0)
        self.received_bytes: dict[PeerClass, int] = dict.fromkeys(PEER_CLASSES, 0)
        self.num_connected: dict[PeerClass, int] = dict.fromkeys(PEER_CLASSES, 0)
        self._relayed_bytes = 0
        self._relayed: frozenset[str] = frozenset()

    @property
    def total_bytes(self) -> int:
        """Return all payload bytes, both ways. What is relayed for others comes in and goes out."""
        return sum(self.sent_bytes.values()) + sum(self.received_bytes.values()) + 2 * self._relayed_bytes

    def note(self, connected: Mapping[str, Sequence[str]]) -> None:
        """`connected` are the remote addresses of open connections, by peer id."""
        self._relayed = frozenset(
            peer_id for peer_id, addrs in connected.items() if addrs and all("/p2p-circuit" in addr for addr in addrs)
        )
        self.num_connected = {"direct": len(connected) - len(self._relayed), "relayed": len(self._relayed)}

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
        self.sent_bytes[self._class_of(peer_id)] += num_bytes

    def received_in_turn(self, peer_id: str, num_bytes: int) -> None:
        """Count bytes that were charged as they were read."""
        self.received_bytes[self._class_of(peer_id)] += num_bytes

    def relayed(self, num_bytes: int) -> None:
        """Count and charge bytes that this node passes from one peer to another."""
        self._relayed_bytes += num_bytes
        self.turns.charge(num_bytes)
        self.download.charge(num_bytes)

    def _class_of(self, peer_id: str) -> PeerClass:
        return "relayed" if peer_id in self._relayed else "direct"
