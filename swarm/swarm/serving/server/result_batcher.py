"""Sends the results of a server's session to the client.

Results go at once where the client waits for them, else several together: a server in the middle pushes its outputs on,
and the client's copy of them is needed only if the next server dies. If each token's result was sent alone, the client
and both network daemons would wake up for it while the next server computes.

Used in the server's event loop only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import StepResult

from swarm.serving.wire.multiplexed_connection import MultiplexedConnection

REPORT_S = 0.1
"""Time that a result may wait. All sessions flush at the same moments, so that the results of a connection go in one
message."""

MAX_WAITING = 32
"""Results of a session. So many within REPORT_S are a prompt in small pieces."""


class FlushTimer:
    """The moments at which sessions send the results that can wait. One for all sessions of a server."""

    def __init__(self) -> None:
        self._waiting: dict[ResultBatcher, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, batcher: ResultBatcher) -> None:
        """Flush it at the next one. A second call does nothing."""
        self._waiting[batcher] = None
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at((math.floor(loop.time() / REPORT_S) + 1) * REPORT_S, self._tick)

    def remove(self, batcher: ResultBatcher) -> None:
        """Flush the batcher no more; a second call does nothing."""
        self._waiting.pop(batcher, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for batcher in waiting:
            batcher.flush()


class ResultBatcher:
    """Sends results to the client at the other end of `connection`."""

    def __init__(self, connection: MultiplexedConnection, flush_timer: FlushTimer) -> None:
        self._connection = connection
        self._flush_timer = flush_timer
        self._waiting: list[StepResult] = []

    def add(self, result: StepResult, *, can_wait: bool) -> None:
        """Send a result at once, or later if it `can_wait`; in the order of the calls. Nothing is sent once the
        connection has ended."""
        if not result.passed_on:
            self.flush()
        self._waiting.append(result)
        if not can_wait or len(self._waiting) >= MAX_WAITING:
            self.flush()
        elif len(self._waiting) == 1:
            self._flush_timer.add(self)

    def flush(self) -> None:
        """Send the results that wait."""
        waiting = self._waiting
        self.close()
        if waiting and self._connection.error is None:
            self._connection.send(together(waiting))

    def close(self) -> None:
        """Drop the results that wait."""
        self._waiting = []
        self._flush_timer.remove(self)


def together(results: Sequence[StepResult]) -> StepResult:
    """Join results of one session: single tokens that were passed on one after another."""
    last = results[-1]
    if len(results) == 1:
        return last
    parts = [result.rows for result in results if result.rows is not None]
    rows = Rows(
        codec=parts[0].codec,
        num_rows=len(parts),
        num_columns=parts[0].num_columns,
        payload=b"".join(part.payload for part in parts),
    )
    return replace(
        last,
        rows=rows,
        compute_ms=sum(result.compute_ms for result in results),
        queue_ms=sum(result.queue_ms for result in results),
        push_failed=any(result.push_failed for result in results),
        codec_error=max(result.codec_error for result in results),
    )
