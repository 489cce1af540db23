"""Defines the greeting of two nodes, and the interface of the gate that replaces it in a private network.
`network_entry` uses both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_protocol.version import Hello, software_version

HELLO = "/swarm/hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """A peer's hello, and the seconds by which its clock is ahead of this node's."""

    hello: Hello
    skew_s: float


def hello_of(network_id: str, sent_at: float = 0.0) -> Hello:
    """Return this node's hello."""
    return Hello(network_id=network_id, software_version=software_version(), sent_at=sent_at)


def greeting_of(hello: Hello, before: float) -> Greeting:
    """Return the greeting for a hello that came now, in answer to one sent at `before` (Unix seconds). The skew is 0 if
    the hello has no time."""
    after = time.time()
    return Greeting(hello=hello, skew_s=hello.sent_at - (before + after) / 2 if hello.sent_at else 0.0)


def off_by(skew_s: float) -> str:
    """Return `20 s behind` or `3 days ahead of`, as this node's clock is where peers' are `skew_s` ahead."""
    units = (("days", 86400), ("h", 3600), ("min", 60))
    unit, unit_s = next((each for each in units if abs(skew_s) >= 2 * each[1]), ("s", 1))
    return f"{abs(skew_s) / unit_s:.0f} {unit} {'behind' if skew_s > 0 else 'ahead of'}"


class Gate(Protocol):
    """Decides which peers a host in a private network calls and answers. In an open network a host has no gate."""

    def wire_name(self, protocol: str) -> str:
        """Return the name on the wire of a protocol of Swarm."""

    async def greet(self, peer_id: str, *, addrs: Sequence[str] | None = None) -> Greeting:
        """Show this node's chain of certificates to a peer, and check the peer's chain. Raises PeerError."""

    async def enter(self, peer_id: str, protocol: str, addrs: Sequence[str] | None) -> None:
        """Check that a peer may be asked for `protocol`, and greet it if it is unknown. Raises PeerError."""

    async def admits(self, peer_id: str, protocol: str) -> bool:
        """Return whether to answer a peer that asks for `protocol`."""
