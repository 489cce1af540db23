"""Measures round-trip times to peers with real calls, and remembers them for a while.

If recent calls that a peer answers at once have shown its round trip, no ping is sent. Otherwise the peer is pinged;
every node answers pings. A peer can appear farther away than it is, but never nearer. A peer's own claims about its
links are in its records.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from itertools import pairwise

from swarm_protocol.errors import PeerTimeout, PeerUnreachable, PeerViolation, SwarmError

from swarm.network.interface import Network
from swarm.newest_items import NewestItems

PING_METHOD = "ping"

NUM_PINGS = 3
"""Pings of one measurement, of which the fastest counts. The first ping may have to open a connection."""

LIFETIME_S = 60.0
"""Time until a round trip is measured again. Routes seldom change, and other code notices a dead peer."""

KEPT_S = 3 * LIFETIME_S
"""Maximum age of a remembered round trip. A caller that cannot wait may use an old value, but not one of many
minutes."""

MAX_PEERS = 4096
"""Maximum peers remembered. The peer whose round trip was asked for least recently is dropped first."""

MAX_MEASURED_AT_ONCE = 16
"""Maximum peers that one request may ping, since each ping may open a connection to a stranger."""

logger = logging.getLogger(__name__)


class RoundTrips:
    """The round trips from one node. Any task of the node may ask."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._chance = random.Random(network.peer_id)
        self._known = NewestItems[str, tuple[float, float]](MAX_PEERS)  # seconds, and when they were measured

    async def serve(self) -> None:
        """Answer the pings of all peers. Call it once for each network."""
        await self._network.serve(PING_METHOD, _pong)

    async def measure_s(self, peer_id: str, *, timeout_s: float) -> float:
        """Return the round trip in seconds, measured at most LIFETIME_S ago; 0 for this node itself. Raises
        PeerError."""
        if peer_id == self._network.peer_id:
            return 0.0
        if not self._is_fresh(peer_id):
            try:
                shown_s = self._network.links.round_trip_s(peer_id, max_age_s=LIFETIME_S)
                rtt_s = await self._ping_s(peer_id, timeout_s) if shown_s is None else shown_s
                self._known[peer_id] = rtt_s, asyncio.get_running_loop().time()
            except SwarmError:
                self._known.pop(peer_id, None)
                raise
        rtt_s, _ = self._known[peer_id] = self._known[peer_id]  # the latest asked for
        return rtt_s

    async def measure_some(self, peer_ids: Sequence[str], *, timeout_s: float) -> None:
        """Measure up to MAX_MEASURED_AT_ONCE of the peers that are due, drawn at random. A peer that does not answer in
        time stays unknown."""
        due = [peer_id for peer_id in peer_ids if not self._is_fresh(peer_id)]
        chosen = self._chance.sample(due, min(len(due), MAX_MEASURED_AT_ONCE))
        async with asyncio.TaskGroup() as pings:
            for peer_id in chosen:
                pings.create_task(self._try_to_measure(peer_id, timeout_s))

    async def silent(self, peer_ids: Sequence[str], *, timeout_s: float) -> set[str]:
        """Ping up to MAX_MEASURED_AT_ONCE of the peers, drawn at random, and return those that do not answer in time,
        and of which nothing else was heard in the last half of it. Remembered round trips are not used."""
        asked = self._chance.sample(peer_ids, min(len(peer_ids), MAX_MEASURED_AT_ONCE))
        async with asyncio.TaskGroup() as pings:
            answers = [pings.create_task(self._answers(peer_id, timeout_s)) for peer_id in asked]
        return {peer_id for peer_id, answer in zip(asked, answers, strict=True) if not answer.result()}

    async def _answers(self, peer_id: str, timeout_s: float) -> bool:
        try:
            await self._network.call(peer_id, PING_METHOD, b"", timeout_s=timeout_s, max_bytes=0)
        except PeerTimeout:
            # on a slow line the answer waits behind other bytes, which show as well that the peer is there
            return self._network.links.was_heard(peer_id, within_s=timeout_s / 2)
        except PeerUnreachable:
            return False
        except SwarmError:
            pass  # a refusal is an answer
        return True

    def known_s(self, peer_id: str) -> float | None:
        """Return the round trip in seconds, measured at most KEPT_S ago; None if unknown, 0 for this node itself. Sends
        nothing."""
        if peer_id == self._network.peer_id:
            return 0.0
        rtt_s, measured_at_s = self._known.get(peer_id, (0.0, -KEPT_S))
        if asyncio.get_running_loop().time() - measured_at_s < KEPT_S:
            return rtt_s
        return self._network.links.round_trip_s(peer_id, max_age_s=KEPT_S)

    def all_known_s(self) -> list[float]:
        """Return every round trip in seconds that was measured at most KEPT_S ago."""
        since_s = asyncio.get_running_loop().time() - KEPT_S
        return [rtt_s for rtt_s, measured_at_s in self._known.values() if measured_at_s > since_s]

    def _is_fresh(self, peer_id: str) -> bool:
        _, measured_at_s = self._known.get(peer_id, (0.0, -LIFETIME_S))
        return asyncio.get_running_loop().time() - measured_at_s < LIFETIME_S

    async def _try_to_measure(self, peer_id: str, timeout_s: float) -> None:
        try:
            await self.measure_s(peer_id, timeout_s=timeout_s)
        except SwarmError as error:  # the peer stays listed, with an unknown round trip
            logger.debug("the round trip to %s is not known: %s", peer_id, error)

    async def _ping_s(self, peer_id: str, timeout_s: float) -> float:
        loop = asyncio.get_running_loop()
        times_s = [loop.time()]
        for _ in range(NUM_PINGS):
            left_s = times_s[0] + timeout_s - times_s[-1]
            await self._network.call(peer_id, PING_METHOD, b"", timeout_s=left_s, max_bytes=0)
            times_s.append(loop.time())
        return min(later - earlier for earlier, later in pairwise(times_s))


async def _pong(peer_id: str, request: bytes) -> bytes:
    if request:
        raise PeerViolation("a ping carries nothing", peer_id=peer_id)
    return b""
