"""Defines what two nodes say to each other first, and the gate that a private network has in its place. See
`network_entry`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_protocol.version import Hello, software_version

HELLO = "/swarm/hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """A peer's hello, and how far its clock is ahead of ours, in seconds."""

    hello: Hello
    skew_s: float


def hello_of(network_id: str, sent_at: float = 0.0) -> Hello:
    """Return this node's hello."""
    return Hello(network_id=network_id, software_version=software_version(), sent_at=sent_at)


def greeting_of(hello: Hello, before: float) -> Greeting:
    """Return what an answer says of the peer's clock. `before`: when it was asked for."""
    after = time.time()
    return Greeting(hello=hello, skew_s=hello.sent_at - (before + after) / 2 if hello.sent_at else 0.0)


class Gate(Protocol):
    """Answers what a host in a private network asks before it calls or answers; an open network has none."""

    def wire_name(self, protocol: str) -> str:
        """Return the name under which a protocol of ours is known on the wire."""

    async def greet(self, peer_id: str, *, addrs: Sequence[str] | None = None) -> Greeting:
        """Show this node's chain to a peer, and check the peer's. Raises PeerError."""

    async def enter(self, peer_id: str, protocol: str, addrs: Sequence[str] | None) -> None:
        """Make sure that a peer may be asked for `protocol`, and knows this node. Raises PeerError."""

    async def admits(self, peer_id: str, protocol: str) -> bool:
        """Return whether a peer that asks for `protocol` is to be answered."""
