"""Announces what a server serves: its span, its measured times, its load and its token rate.

`SpanAnnouncer.run`, a task of its server, publishes whenever the load has changed, and measures the blocks again while
they are idle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from swarm_protocol.errors import SwarmError
from swarm_protocol.records import ServeRecord

from swarm.network.membership import Membership
from swarm.recent_rate import RecentRate
from swarm.serving.server.deployment import Deployment

if TYPE_CHECKING:
    from swarm.serving.server.span_server import SpanServer

logger = logging.getLogger(__name__)

ANNOUNCE_S = 3.0
"""Minimum seconds between two publications of a changed load: often enough to spread sessions, rarely enough for the
DHT."""
LOOK_S = 15.0
"""Seconds between two updates of the token rate, which is published while there is one."""
IDLE_S = 60.0
"""Seconds without a token after which the blocks are measured again, and again after each further such time."""

WINDOW_S = 60.0


class SpanAnnouncer:
    """Publishes the record of what `server` serves, but nothing while it has no blocks.

    The owner may set `rtt_ms`, `is_relayed`, `moving_to`, `send_ms` and `token_ms`, which the next `announce`
    publishes.
    """

    def __init__(self, membership: Membership, server: SpanServer) -> None:
        self.rtt_ms: Mapping[str, float] = {}
        self.is_relayed = False
        self.moving_to = (0, 0)
        self.send_ms = 0.0
        self.token_ms: Mapping[str, float] = {}
        self._membership = membership
        self._server = server
        self._rate: RecentRate | None = None
        self._idle_since_s = 0.0
        self._tokens_per_s = 0.0
        self._changed = asyncio.Event()

    @property
    def record(self) -> ServeRecord:
        """The record to announce now. Valid only while there are blocks."""
        server = self._server
        assert server.deployed is not None, "not started, or closed"
        loaded, speed = server.deployed.loaded, server.deployed.speed
        start, end = server.deployed.blocks
        return ServeRecord(
            model=server.name,
            revision=loaded.revision,
            num_blocks=loaded.span.num_blocks,
            start=start,
            end=end,
            state=server.state,
            prefill_ms_per_token=speed.prefill_ms,
            decode_ms_per_block=speed.decode_ms,
            free_kv_tokens=server.deployed.engine.free_tokens,
            queue_depth=len(server.sessions),
            rtt_ms=self.rtt_ms,
            relayed=self.is_relayed,
            next_start=self.moving_to[0],
            next_end=self.moving_to[1],
            tokens_per_s=self._tokens_per_s,
            source=loaded.source,
            send_ms_per_token=0.0 if end == loaded.span.num_blocks else self.send_ms,
            token_ms=self.token_ms,
            manifest=b"" if loaded.manifest is None else loaded.manifest.digest,
            dtype=server.deployed.options.dtype,
        )

    def announce(self) -> None:
        """Publish the record now. While there are no blocks, the last record stays published."""
        if self._server.deployed is not None:
            self._update_rate(self._server.deployed)
            self._membership.announce(self.record)

    def withdraw(self) -> None:
        self._membership.withdraw("serve", self._server.name)

    def changed(self) -> None:
        """Announce soon, since the load has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Announce at once, and then whenever the load has changed, but not more often than every ANNOUNCE_S.

        It also announces while tokens are computed, and once after they have stopped.
        """
        self._idle_since_s = asyncio.get_running_loop().time()
        self._rate = RecentRate(self._idle_since_s, WINDOW_S)
        while True:
            self._changed.clear()
            self.announce()
            await asyncio.sleep(ANNOUNCE_S)
            is_news = False
            while not is_news:
                try:
                    async with asyncio.timeout(LOOK_S):
                        is_news = await self._changed.wait()
                except TimeoutError:
                    deployed = self._server.deployed
                    is_news = deployed is not None and (
                        self._update_rate(deployed) or await self._measure_if_idle(deployed)
                    )

    def _update_rate(self, deployed: Deployment) -> bool:
        """Update the token rate, and return whether it has changed."""
        before, now = self._tokens_per_s, asyncio.get_running_loop().time()
        if before or deployed.engine.load.num_running:
            self._idle_since_s = now
        if self._rate is not None:
            self._tokens_per_s = self._rate.per_s(self._server.num_tokens, now)
        return self._tokens_per_s != before

    async def _measure_if_idle(self, deployed: Deployment) -> bool:
        """Measure the blocks again if they are idle, and return whether that was done and is to be announced."""
        now = asyncio.get_running_loop().time()
        if self._server.state != "serving" or now - self._idle_since_s < IDLE_S:
            return False
        self._idle_since_s = now
        try:
            await deployed.measure_again()
        except (SwarmError, RuntimeError, MemoryError) as error:  # also if the server has moved to other blocks
            logger.warning("could not measure the blocks of %s again: %s", self._server.name, error)
            return False
        return True
