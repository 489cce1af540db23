"""Sends rows and tokens from a server's session to the next server.

At the last server the next one is the first one, which gets the token that was drawn, as far as the client allows it. A
push that is lost or refused is left to the client, which has a copy. Used in the server's event loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from swarm_protocol import limits
from swarm_protocol.errors import SwarmError
from swarm_protocol.rows import TOKENS, Rows
from swarm_protocol.session_frames import Push, SequenceRef, Spent, TokenDraw

from swarm.serving.server.push_connections import PushConnections
from swarm.serving.server.session_inbox import CheckedStep

logger = logging.getLogger(__name__)

MAX_REFUSED = 8
"""Pushes that the next server may refuse. Otherwise a client could make this server flood one that wants none."""


class SessionLink:
    """`next` is the sequence that is pushed to, if any. `is_cut_off`: pushes are lost until the client links again.

    `num_links` counts the client's links. `take_own` takes a push to the session itself, where one server has all
    blocks; `on_failed` is called when the next server has refused a push, or has gone.
    """

    def __init__(
        self,
        push_connections: PushConnections,
        client: str,
        sequence_id: bytes,
        *,
        take_own: Callable[[Push], None],
        on_failed: Callable[[SwarmError], None],
    ) -> None:
        self.next: SequenceRef | None = None
        self.is_cut_off = False
        self.num_links = 0
        self._push_connections = push_connections
        self._client = client
        self._own = SequenceRef(peer_id=push_connections.peer_id, sequence_id=sequence_id)
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
            self._push_connections.unlink(self.next.peer_id, (self._client, self.next.sequence_id))
        self.next = to
        if to is not None and to != self._own:
            self._push_connections.link(to.peer_id, (self._client, to.sequence_id), self._failed)

    async def room(self) -> None:
        """Wait while much is unsent to the next server."""
        if self.next is not None:
            await self._push_connections.room(self.next.peer_id)

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
            self._push_connections.push(self.next.peer_id, frame)
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
            elif self._push_connections.is_open(to.peer_id):
                self._push_connections.push(to.peer_id, frame)
            else:
                self.is_cut_off = not self._push_connections.is_coming(to.peer_id)
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
