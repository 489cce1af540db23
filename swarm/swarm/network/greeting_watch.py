"""Compares a running node with its connected peers, by what they answer to a greeting: its clock, since records and
messages are judged by the times in them, and its protocol version.

The median of several clocks counts, so that one that lies, or whose own clock is wrong, decides nothing. A node is
refused by name only while it joins. One that runs while the others are updated stays connected to them, but neither
side can call the other: without `VersionWatch` it would be alone without a word. The caller's task owns the watches.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import suppress

from swarm_protocol import limits
from swarm_protocol.errors import PeerError
from swarm_protocol.version import PROTOCOL_VERSION, Hello

from swarm.network.libp2p.greeting import Greeting
from swarm.network.libp2p.host import Host
from swarm.network.network_entry import MIN_CLOCKS, SEED_TIMEOUT_S, greet

CLOCK_S = 120.0
"""Pause between two looks."""

NUM_ASKED = 7
"""Peers that are asked at each look."""


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


async def ask_greetings(host: Host, peer_ids: Sequence[str], network_id: str) -> list[Greeting]:
    """Greet connected peers. Return the answers of those that are in this network, whatever their version."""

    async def ask(peer_id: str) -> Greeting | None:
        with suppress(PeerError, TimeoutError):
            async with asyncio.timeout(SEED_TIMEOUT_S):
                return await greet(host, peer_id, network_id, addrs=())
        return None

    answers = await asyncio.gather(*map(ask, peer_ids))
    return [each for each in answers if each is not None and each.hello.network_id == network_id]


def clock_skews_s(greetings: Sequence[Greeting]) -> list[float]:
    """Return how far the clock of each peer that told its time is ahead, in seconds."""
    return [each.skew_s for each in greetings if each.hello.sent_at]
