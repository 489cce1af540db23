"""Defines the first message between two peers, and checks whether they can work together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Annotated, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import check_name, number, one_line, whole
from swarm_protocol.errors import PeerRefused
from swarm_protocol.proto import hello_pb2

# Increases with a release whose peers cannot work with those of earlier ones: other methods, other meanings, other
# bounds. Changes between two releases share one number.
PROTOCOL_VERSION = 7


@cache
def software_version() -> str:
    """Return the installed distribution's version, for people and logs only: no decision depends on it."""
    return metadata.version("swarm-node")


def version_text(software: str, protocol: int) -> str:
    """Name a version as in `0.1.0, protocol 7`; without the protocol if this is 0, which means unknown."""
    return f"{software}, protocol {protocol}" if protocol else software


def check_network_id(network_id: object, _field: str = "") -> str:
    """Check a name of at most MAX_NETWORK_ID_BYTES. Raises ValueError."""
    return check_name(network_id, "network id", max_bytes=limits.MAX_NETWORK_ID_BYTES)


NetworkId: TypeAlias = Annotated[str, check_network_id]
KnownProtocol: TypeAlias = Annotated[int, whole(2**31 - 1)]
"""The protocol version of a node; 0 if it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(wire.WireMessage):
    """The greeting of both sides of a connection. `sent_at` is the sender's clock in Unix seconds; 0 means unknown."""

    PROTO = hello_pb2.Hello
    MAX_BYTES = limits.MAX_HELLO_BYTES

    network_id: NetworkId
    protocol_version: Annotated[int, whole(2**31 - 1, low=1)] = PROTOCOL_VERSION
    software_version: Annotated[str, one_line(limits.MAX_VERSION_CHARS)]
    sent_at: Annotated[float, number(limits.MAX_TIME_S)] = 0.0


def check_hello(ours: Hello, theirs: Hello, peer_id: str) -> None:
    """Check a peer's greeting. Raises PeerRefused, with the remedy, if `peer_id` is in another network, or its protocol
    version or clock differs.

    Clocks may differ by MAX_CLOCK_SKEW_S. Beyond that, records, which carry times, would look expired or not yet
    issued.
    """
    if theirs.network_id != ours.network_id:
        raise PeerRefused(
            f"peer is in network {theirs.network_id!r}, and this node in {ours.network_id!r}",
            remedy="give both the same network id, or other peers",
            peer_id=peer_id,
        )
    if theirs.protocol_version != ours.protocol_version:
        older = "this node" if ours.protocol_version < theirs.protocol_version else "the peer"
        raise PeerRefused(
            f"peer speaks protocol {theirs.protocol_version} (software {theirs.software_version}), "
            f"and this node {ours.protocol_version} (software {ours.software_version})",
            remedy=f"update {older}",
            peer_id=peer_id,
        )
    skew_s = theirs.sent_at - ours.sent_at
    if theirs.sent_at and ours.sent_at and abs(skew_s) > limits.MAX_CLOCK_SKEW_S:
        raise PeerRefused(
            f"the clocks differ by {abs(skew_s):.0f} s; the peer's is {'ahead' if skew_s > 0 else 'behind'}",
            remedy="set the clock that is wrong, for example by turning on network time",
            peer_id=peer_id,
        )
