"""Sends what leaves a server's session: rows and tokens to the next server, and results to the client.

At the last server the next one is the first one, which gets the token that was drawn, as far as the client allows it. A
push that is lost or refused is left to the client, which has a copy.

Results go at once where the client waits for them, else several together: a server in the middle pushes its outputs on,
and the client's copy of them is needed only if the next server dies. If each token's result was sent alone, the client
and both network daemons would wake up for it while the next server computes.

`AnswerLog` keeps the digests of what the session took and gave, and makes the commitment that is signed of them when
the client closes it. Every session has a log, whether its client checks answers or not: a server that knew which
answers are checked could lie in the others.

Used in the server's event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from swarm_protocol import limits
from swarm_protocol.answer_commitments import AnswerCommitment, PositionDigests
from swarm_protocol.errors import SwarmError
from swarm_protocol.limits import PAGE_TOKENS
from swarm_protocol.rows import TOKENS, Rows
from swarm_protocol.session_frames import Push, SequenceRef, Spent, StepResult, TokenDraw

from swarm.serving.engine.page_allocator import PageInputs
from swarm.serving.server.forwarder import Forwarder
from swarm.serving.server.session_inbox import CheckedStep
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection

Signer: TypeAlias = Callable[[AnswerCommitment], bytes]
"""Return the commitment in an envelope of this server."""

logger = logging.getLogger(__name__)

MAX_REFUSED = 8
"""Pushes that the next server may refuse. Otherwise a client could have this server flood one that wants none."""

REPORT_S = 0.1
"""Time that a result may wait. All sessions flush at the same moments, so that the results of a connection go in one
message."""

MAX_WAITING = 32
"""Results of a session. So many within REPORT_S are a prompt in small pieces."""


class SessionLink:
    """`next` is the sequence that is pushed to, if any. `is_cut_off`: pushes are lost until the client links again.

    `num_links` counts the client's links. `take_own` takes a push to the session itself, where one server has all
    blocks; `on_failed` is called when the next server has refused a push, or has gone.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        client: str,
        sequence_id: bytes,
        *,
        take_own: Callable[[Push], None],
        on_failed: Callable[[SwarmError], None],
    ) -> None:
        self.next: SequenceRef | None = None
        self.is_cut_off = False
        self.num_links = 0
        self._forwarder = forwarder
        self._client = client
        self._own = SequenceRef(peer_id=forwarder.peer_id, sequence_id=sequence_id)
        self._take_own = take_own
        self._on_failed = on_failed
        self._num_refused = 0

    def relink(self, to: SequenceRef | None) -> None:
        """Push to `to` from now on, as the client has said."""
        self.set_next(to)
        self.is_cut_off, self._num_refused = False, 0
        self.num_links = min(self.num_links + 1, limits.MAX_LINK_UPDATES)

    def set_next(self, to: SequenceRef | None) -> None:
        if to == self.next:
            return
        if self.next is not None:
            self._forwarder.unlink(self.next.peer_id, (self._client, self.next.sequence_id))
        self.next = to
        if to is not None and to != self._own:
            self._forwarder.link(to.peer_id, (self._client, to.sequence_id), self._failed)

    async def room(self) -> None:
        """Wait while much is unsent to the next server."""
        if self.next is not None:
            await self._forwarder.room(self.next.peer_id)

    def push_rows(self, step: CheckedStep, rows: Rows, spent_ms: Spent) -> None:
        """Send a step's outputs to the next server, or cut the session off from it. There is a next server."""
        assert self.next is not None
        frame = Push(
            client_peer_id=self._client,
            sequence_id=self.next.sequence_id,
            position=step.position,
            want=step.want,
            draw=step.draw,
            rows=rows,
            source_id=self._own.sequence_id,
            upstream_ms=(*step.upstream_ms, spent_ms)[-limits.MAX_UPSTREAM :] if step.num_rows == 1 else (),
        )
        try:
            self._forwarder.push(self.next.peer_id, frame)
        except SwarmError as error:
            logger.debug("%s takes no pushes: %s", self.next.peer_id, error)
            self._cut_off()

    def push_token(self, position: int, token_id: int, draw: TokenDraw) -> bool:
        """Give the first server the token that was drawn. False if that is left to the client."""
        to = self.next
        if to is None:
            return False
        frame = Push(
            client_peer_id=self._client,
            sequence_id=to.sequence_id,
            position=position,
            want="token",
            draw=replace(draw, index=draw.index + 1, ahead=draw.ahead - 1),
            rows=Rows(codec=TOKENS, num_rows=1, num_columns=0, payload=token_id.to_bytes(4, "little")),
            source_id=self._own.sequence_id,
        )
        try:
            if to == self._own:
                self._take_own(frame)
            elif self._forwarder.is_open(to.peer_id):
                self._forwarder.push(to.peer_id, frame)
            else:
                self.is_cut_off = not self._forwarder.is_coming(to.peer_id)
                return False
        except SwarmError as error:
            logger.debug("a token is left to the client: %s", error)
            return False
        return True

    def _failed(self, error: SwarmError, *, is_linked: bool) -> None:
        self._num_refused += 1
        if not is_linked or self._num_refused >= MAX_REFUSED:
            self._cut_off()
        self._on_failed(error)

    def _cut_off(self) -> None:
        self.set_next(None)
        self.is_cut_off = True


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


class AnswerLog:
    """`inputs` are rows as they came on the wire; `outputs` are rows as they were sent, or draws.

    The session began with cached pages that were computed from the inputs `cached`. These count only if they follow
    each other: a client that names pages may put together what was never computed as one, and the server would sign
    for what it did not do.
    """

    def __init__(self, cached: Sequence[PageInputs | None] = ()) -> None:
        self.inputs = PositionDigests()
        self.outputs = PositionDigests()
        self._after = b""
        self._num_after = 0
        if known := _consecutive(cached):
            self.inputs.add_digests(0, b"".join(page.digests for page in known))

    def took(self, position: int, rows: Rows) -> None:
        self.inputs.add_rows(position, rows.payload, rows.row_bytes)

    def page(self, index: int) -> PageInputs | None:
        """Return what the page that was just computed is of; None if not all positions before it are known. Pages are
        asked for in their order."""
        if self.inputs.start or self.inputs.end < (index + 1) * PAGE_TOKENS:
            return None
        while self._num_after < index:
            self._after = self._page(self._num_after).after
            self._num_after += 1
        return self._page(index)

    def _page(self, index: int) -> PageInputs:
        return PageInputs(self._after, self.inputs.between(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS))

    def gave(self, position: int, rows: Rows) -> None:
        self.outputs.add_rows(position, rows.payload, rows.row_bytes)

    def commitment(
        self, client: str, sequence_id: bytes, *, model: str, revision: str, blocks: tuple[int, int], until: int
    ) -> AnswerCommitment:
        """Return what holds of the positions before `until`, which the client has heard of."""
        inputs, outputs = self.inputs, self.outputs
        return AnswerCommitment(
            client_peer_id=client,
            sequence_id=sequence_id,
            model=model,
            revision=revision,
            start=blocks[0],
            end=blocks[1],
            inputs_from=inputs.start,
            inputs_to=max(inputs.start, min(until, inputs.end)),
            inputs_digest=inputs.digest(until),
            outputs_from=outputs.start,
            outputs_to=max(outputs.start, min(until, outputs.end)),
            outputs_digest=outputs.digest(until),
        )


def _consecutive(pages: Sequence[PageInputs | None]) -> list[PageInputs]:
    """Return the pages if each was computed after the one before it, else none."""
    found, after = list[PageInputs](), b""
    for page in pages:
        if page is None or page.before != after:
            return []
        found.append(page)
        after = page.after
    return found
