"""The greeting of two nodes: each tells the other its network, its protocol version and its time.

`HELLO` is the one method whose name carries no network id, so that two peers that cannot work together can say why. In
a private network a `Gate` replaces the greeting. `network_entry` compares greetings while a node joins.

A running node is compared with its connected peers: its clock, since records and messages are judged by the times in
them (`ClockWatch`), and its protocol version (`VersionWatch`). The median of several clocks counts, so that one that
lies, or whose own clock is wrong, decides nothing. A node is refused by name only while it joins. One that runs while
the others are updated stays connected to them, but neither side can call the other: without `VersionWatch` it would be
alone without a word. The caller's task owns the watches.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swarm_protocol import limits
from swarm_protocol.errors import PeerError, PeerRefused
from swarm_protocol.version import PROTOCOL_VERSION, Hello, check_hello, software_version

from swarm.network.interface import NotServed

if TYPE_CHECKING:
    from swarm.network.libp2p.host import Host
    from swarm.network.libp2p.unary_connection import UnaryAnswer

HELLO = "/swarm/hello"

ANSWER_S = 5.0
"""Time for a connected peer to answer a greeting."""

MIN_CLOCKS = 3
"""Peers whose clocks together show that this machine's is wrong. With fewer one peer could decide."""

CLOCK_S = 120.0
"""Pause between two looks."""

NUM_ASKED = 7
"""Peers that are asked at each look."""


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


def method_prefix(network_id: str) -> str:
    """Return the prefix of all method names of a network."""
    return f"/swarm/{PROTOCOL_VERSION}/{network_id}/"


def hello_answer(network_id: str) -> UnaryAnswer:
    async def answer(_peer_id: str, _request: bytes) -> bytes:
        return hello_of(network_id, time.time()).to_bytes()

    return answer


async def greet(host: Host, peer_id: str, network_id: str, *, addrs: Sequence[str] | None = None) -> Greeting:
    """Exchange hellos with a peer. Raises PeerUnreachable, PeerRefused (no Swarm node) or PeerViolation, and in a
    private network what `PrivateGate.greet` raises. `addrs` is as in `Host.call`."""
    if host.gate is not None:
        return await host.gate.greet(peer_id, addrs=addrs)
    before = time.time()
    try:
        answer = await host.call(peer_id, HELLO, hello_of(network_id, before).to_bytes(), addrs=addrs)
    except NotServed:
        raise PeerRefused(
            "the peer is a libp2p host, but no Swarm node that answers strangers",
            remedy="check the address; if its network is private, give --invite an invitation from the network's owner",
            peer_id=peer_id,
        ) from None
    return greeting_of(Hello.from_bytes(answer), before)


async def check_network_peer(host: Host, peer_id: str, network_id: str) -> None:
    """Greet a peer that connected to this node. Raises PeerError unless it says that it is of this network."""
    greeting = await greet(host, peer_id, network_id, addrs=())
    check_hello(hello_of(network_id), greeting.hello, peer_id)


async def explain_refusal(host: Host, peer_id: str, network_id: str, method: str) -> PeerError:
    """Return the reason why `peer_id` does not serve `method`, as an error."""
    try:
        greeting = await greet(host, peer_id, network_id)
        check_hello(hello_of(network_id), greeting.hello, peer_id)
    except PeerError as error:
        return error
    return PeerRefused(f"the peer does not serve {method!r}", remedy="ask one that does", peer_id=peer_id)


async def ask_greetings(host: Host, peer_ids: Sequence[str], network_id: str) -> list[Greeting]:
    """Greet connected peers. Return the answers of those that are in this network, whatever their version."""

    async def ask(peer_id: str) -> Greeting | None:
        with suppress(PeerError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                return await greet(host, peer_id, network_id, addrs=())
        return None

    answers = await asyncio.gather(*map(ask, peer_ids))
    return [each for each in answers if each is not None and each.hello.network_id == network_id]


def clock_skews_s(greetings: Sequence[Greeting]) -> list[float]:
    """Return how far the clock of each peer that told its time is ahead, in seconds."""
    return [each.skew_s for each in greetings if each.hello.sent_at]


class ClockWatch:
    """Tells once that this node's clock is wrong, and once that it is right again."""

    def __init__(self) -> None:
        self.is_wrong = False

    def look(self, skews_s: Sequence[float]) -> float | None:
        """Return by how many seconds the peers' clocks are ahead if `is_wrong` changes with these answers, else None.

        A wrong clock has to come well within the limit to be right again, so that one at the limit is told of once.
        """
        if len(skews_s) < MIN_CLOCKS:
            return None
        skew_s = statistics.median(skews_s)
        was_wrong = self.is_wrong
        self.is_wrong = abs(skew_s) > limits.MAX_CLOCK_SKEW_S / (2 if was_wrong else 1)
        return None if self.is_wrong == was_wrong else skew_s


class VersionWatch:
    """Tells once that peers are newer than this node, and once that they are older."""

    def __init__(self) -> None:
        self._told: set[bool] = set()

    def look(self, hellos: Sequence[Hello]) -> Hello | None:
        """Return the newest of the peers' hellos with another protocol version if there is something to tell.

        It is told if at least half of the peers differ, since these cut this node off from the network. So one peer
        that lies is told of only where it is half of the peers that answer.
        """
        others = [hello for hello in hellos if hello.protocol_version != PROTOCOL_VERSION]
        if not others or 2 * len(others) < len(hellos):
            return None
        newest = max(others, key=lambda hello: hello.protocol_version)
        is_newer = newest.protocol_version > PROTOCOL_VERSION
        if is_newer in self._told:
            return None
        self._told.add(is_newer)
        return newest
