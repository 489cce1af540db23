"""Compares the clock of a running node with those of its peers: records and messages are judged by the times in them.

The median of several peers counts, so that one that lies, or whose own clock is wrong, decides nothing. The caller's
task owns the watch.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import suppress

from swarm_protocol import limits
from swarm_protocol.errors import PeerError

from swarm.network.libp2p.greeting import Greeting
from swarm.network.libp2p.host import Host
from swarm.network.network_entry import SEED_TIMEOUT_S, greet

CLOCK_S = 120.0
"""Pause between two looks."""

NUM_ASKED = 7
"""Peers that are asked at each look."""

MIN_ANSWERS = 3
"""With fewer answers nothing is said, since one peer could decide."""


class ClockWatch:
    """Tells once that this node's clock is wrong, and once that it is right again."""

    def __init__(self) -> None:
        self.is_wrong = False

    def look(self, skews_s: Sequence[float]) -> float | None:
        """Return by how many seconds the peers' clocks are ahead if `is_wrong` changes with these answers, else None.

        A wrong clock has to come well within the limit to be right again, so that one at the limit is told of once.
        """
        if len(skews_s) < MIN_ANSWERS:
            return None
        skew_s = statistics.median(skews_s)
        was_wrong = self.is_wrong
        self.is_wrong = abs(skew_s) > limits.MAX_CLOCK_SKEW_S / (2 if was_wrong else 1)
        return None if self.is_wrong == was_wrong else skew_s


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
