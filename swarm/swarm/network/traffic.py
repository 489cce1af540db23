"""Bytes that this node sends and receives, counted apart for peers reached directly and through a relay.

Payloads of calls and messages of streams are counted; framing and encryption come on top. A peer is `relayed`
while all connections to it lead through relays, as of the last look at them (`note`): what passed before the first look
counts as direct. State belongs to the network's loop; nothing in it grows with what peers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

PeerClass = Literal["direct", "relayed"]
PEER_CLASSES: tuple[PeerClass, ...] = ("direct", "relayed")


class Traffic:
    """`sent_bytes` and `received_bytes` only grow; `num_connected` are the peers of the last look."""

    def __init__(self) -> None:
        self.sent_bytes: dict[PeerClass, int] = dict.fromkeys(PEER_CLASSES, 0)
        self.received_bytes: dict[PeerClass, int] = dict.fromkeys(PEER_CLASSES, 0)
        self.num_connected: dict[PeerClass, int] = dict.fromkeys(PEER_CLASSES, 0)
        self._relayed: frozenset[str] = frozenset()

    def note(self, connected: Mapping[str, Sequence[str]]) -> None:
        """`connected` are the remote addresses of open connections, by peer id."""
        self._relayed = frozenset(
            peer_id for peer_id, addrs in connected.items() if addrs and all("/p2p-circuit" in addr for addr in addrs)
        )
        self.num_connected = {"direct": len(connected) - len(self._relayed), "relayed": len(self._relayed)}

    def sent(self, peer_id: str, num_bytes: int) -> None:
        self.sent_bytes[self._class_of(peer_id)] += num_bytes

    def received(self, peer_id: str, num_bytes: int) -> None:
        self.received_bytes[self._class_of(peer_id)] += num_bytes

    def _class_of(self, peer_id: str) -> PeerClass:
        return "relayed" if peer_id in self._relayed else "direct"
