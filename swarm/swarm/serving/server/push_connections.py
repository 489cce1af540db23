"""Sends the outputs of one server's sessions to the next servers: rows, and drawn tokens.

A `SessionLink` knows the next server of one session. For the last server that is the first one, which gets the drawn
token if the client allows it. `PushConnections` owns the connections for all sessions. A connection is opened when the
first session is linked to a peer, so that it is open before the first rows are computed. It is closed some time after
the last session is unlinked. Clients name the peers that a server dials, so the number of peers is bounded for each
client and for all. A peer that could not be reached, or has left, is not dialled again at once.

A push that is lost or refused is reported to its session. Nothing is sent twice: the client has a copy and feeds the
next server itself. `PushConnections.run` owns the connections. Everything else is called in its loop and does not wait,
except `room`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.frames import num_bytes
from swarm_protocol.rows import TOKENS, Rows
from swarm_protocol.session_frames import Frame, Push, PushRefused, SequenceRef, Spent, TokenDraw

from swarm.network.interface import Network
from swarm.serving.peer_shares import Limits, Sharer, over_limit
from swarm.serving.server.session_queues import CheckedStep
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, SequenceKey, open_stream

logger = logging.getLogger(__name__)

MAX_PEERS: Limits = (256, 128, 32)
"""Maximum peers at the same time, for all clients, those of one provider's network, and one client. Clients name them,
and each costs a stream. The routes of a gateway continue from here to a few servers; no client may use up the
connections of others."""

REST_S = 5.0
"""Seconds for which an unreachable peer is not dialled. This is half the time for which clients avoid a broken link:
only a client that abuses this server as a dialler asks earlier."""

UNUSED_S = 30.0
"""Seconds for which a connection stays open without a linked session: the next session often comes soon."""

MAX_REFUSED = 8
"""Maximum pushes that the next server may refuse. Otherwise a client could make this server flood one that wants no
pushes."""


class DialLimiter:
    """Bounds the peers that clients make this server dial."""

    def __init__(self) -> None:
        self._clients: dict[str, list[Sharer]] = {}  # by dialled peer, a client for each use
        self._resting: dict[str, tuple[Sharer, float]] = {}  # by peer, the client it was dialled for, and until when

    def begin(self, peer_id: str, client: Sharer) -> bool:
        """Return whether `client` may make this server dial the peer now; if so, `end` must follow."""
        now_s = asyncio.get_running_loop().time()
        self._resting = {peer: rest for peer, rest in self._resting.items() if rest[1] > now_s}
        if peer_id in self._resting:
            return False
        if peer_id not in self._clients:
            named = [clients[0] for clients in self._clients.values()]
            named += [for_client for for_client, _ in self._resting.values()]
            if over_limit(Counter(named).items(), client, 1, MAX_PEERS):
                # no warning: a client may name any number of peers
                logger.debug("%d peers are dialled, and %d of them for %s", len(named), named.count(client), client)
                return False
        self._clients.setdefault(peer_id, []).append(client)
        return True

    def end(self, peer_id: str, client: Sharer, *, rests: bool) -> None:
        """End one use of the peer. With `rests`, the peer could not be reached, or has left, and is not dialled again
        for REST_S."""
        clients = self._clients[peer_id]
        clients.remove(client)
        if not clients:
            del self._clients[peer_id]
        if rests:
            self._resting[peer_id] = client, asyncio.get_running_loop().time() + REST_S


@dataclass(slots=True, eq=False)
class _Outgoing:
    """An outgoing connection, opened for `client` and shared with others. Pushes are in `waiting` until it is open."""

    client: Sharer
    connection: MultiplexedConnection | None = None
    waiting: list[Push] = field(default_factory=list)
    num_waiting_bytes: int = 0
    linked: dict[SequenceKey, SessionLink] = field(default_factory=dict)
    close_timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None


class PushConnections:
    """Owns the connections to next servers, for all sessions of one model."""

    def __init__(self, network: Network, model: str) -> None:
        self.dial_limiter = DialLimiter()
        self._network = network
        self._model = model
        self._outgoing: dict[str, _Outgoing] = {}
        self._wanted: asyncio.Queue[str] = asyncio.Queue()

    @property
    def peer_id(self) -> str:
        """The peer id of this server."""
        return self._network.peer_id

    @property
    def num_connections(self) -> int:
        return len(self._outgoing)

    async def run(self) -> None:
        """Open and keep the connections, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                peer_id = await self._wanted.get()
                outgoing = self._outgoing.get(peer_id)
                if outgoing is None or outgoing.task is not None:
                    continue
                outgoing.task = tasks.create_task(self._keep(peer_id, outgoing), name=f"push to {peer_id}")

    def link(self, peer_id: str, key: SequenceKey, session: SessionLink) -> None:
        """Let a session push to the peer from now on, unless that would exceed the limit of peers."""
        outgoing = self._outgoing.get(peer_id)
        if outgoing is None:
            if not self.dial_limiter.begin(peer_id, session.client):
                return
            outgoing = self._outgoing[peer_id] = _Outgoing(session.client)
            self._wanted.put_nowait(peer_id)
        if outgoing.close_timer is not None:
            outgoing.close_timer.cancel()
            outgoing.close_timer = None
        outgoing.linked[key] = session

    def unlink(self, peer_id: str, key: SequenceKey) -> None:
        outgoing = self._outgoing.get(peer_id)
        if outgoing is None or outgoing.linked.pop(key, None) is None:
            return
        if outgoing.connection is not None:
            outgoing.connection.forget_rows(key)
        if outgoing.linked:
            return
        outgoing.close_timer = asyncio.get_running_loop().call_later(UNUSED_S, self._close, peer_id, outgoing)

    def push(self, peer_id: str, push: Push) -> None:
        """Send a push to the peer, or queue it until the connection is open. Raises PeerError if it cannot be sent."""
        outgoing = self._outgoing.get(peer_id)
        if outgoing is None or (push.client_peer_id, push.sequence_id) not in outgoing.linked:
            raise PeerUnreachable("there is no connection to the next server", peer_id=peer_id)
        if outgoing.connection is not None:
            outgoing.connection.send(push)
            return
        outgoing.num_waiting_bytes += num_bytes(push)
        if outgoing.num_waiting_bytes > limits.MAX_MESSAGE_BYTES:
            raise PeerRefused("too much waits for a connection to the next server", peer_id=peer_id)
        outgoing.waiting.append(push)

    def is_open(self, peer_id: str) -> bool:
        """Return whether a push would be sent at once."""
        outgoing = self._outgoing.get(peer_id)
        return outgoing is not None and outgoing.connection is not None

    def is_coming(self, peer_id: str) -> bool:
        """Return whether there is a connection, or one is being opened."""
        return peer_id in self._outgoing

    def is_sending(self, peer_id: str, key: SequenceKey) -> bool:
        """Return whether a push to a sequence of the peer waits to be sent."""
        outgoing = self._outgoing.get(peer_id)
        connection = outgoing.connection if outgoing is not None else None
        return connection is not None and connection.is_sending(key)

    async def room(self, peer_id: str) -> None:
        """Wait while much data to this peer is unsent. `push` raises if nothing can be sent."""
        outgoing = self._outgoing.get(peer_id)
        if outgoing is not None and outgoing.connection is not None:
            with contextlib.suppress(SwarmError):
                await outgoing.connection.room()

    async def _keep(self, peer_id: str, outgoing: _Outgoing) -> None:
        error: SwarmError | None = None
        try:
            async with open_stream(self._network, peer_id, self._model) as stream:
                outgoing.connection = connection = MultiplexedConnection(stream, peer_id)
                for push in outgoing.waiting:
                    connection.send(push)
                outgoing.waiting.clear()
                await connection.run(lambda frame: self._on_frame(frame, peer_id, outgoing))
                error = connection.error
        except SwarmError as refusal:
            error = refusal
        finally:
            has_left = self._outgoing.get(peer_id) is outgoing
            if has_left:
                del self._outgoing[peer_id]
            self.dial_limiter.end(peer_id, outgoing.client, rests=has_left)
            if outgoing.close_timer is not None:
                outgoing.close_timer.cancel()
        for session in list(outgoing.linked.values()):
            session.push_failed(error or PeerUnreachable("the connection is closed", peer_id=peer_id), is_linked=False)

    def _on_frame(self, frame: Frame, peer_id: str, outgoing: _Outgoing) -> None:
        if not isinstance(frame, PushRefused):
            raise PeerViolation(f"a server sends {type(frame).__name__} to the one before it", peer_id=peer_id)
        session = outgoing.linked.get((frame.client_peer_id, frame.sequence_id))
        if session is not None:
            session.push_failed(frame.error(peer_id), is_linked=True)

    def _close(self, peer_id: str, outgoing: _Outgoing) -> None:
        # a session that links later gets a new connection
        del self._outgoing[peer_id]
        if outgoing.task is not None:
            outgoing.task.cancel()
        else:
            self.dial_limiter.end(peer_id, outgoing.client, rests=False)


class SessionLink:
    """Links one session to the next server. `next` is the sequence to push to, or None. If `is_cut_off`, pushes are
    lost until the client links again.

    `num_links` counts the client's link updates. `take_own` takes a push to the session itself, if one server has all
    blocks; `on_failed` is called when the next server has refused a push, or is gone.
    """

    def __init__(
        self,
        push_connections: PushConnections,
        client: Sharer,
        sequence_id: bytes,
        *,
        take_own: Callable[[Push], None],
        on_failed: Callable[[SwarmError], None],
    ) -> None:
        self.next: SequenceRef | None = None
        self.is_cut_off = False
        self.num_links = 0
        self._push_connections = push_connections
        self.client = client
        self._own = SequenceRef(peer_id=push_connections.peer_id, sequence_id=sequence_id)
        self._take_own = take_own
        self._on_failed = on_failed
        self._num_refused = 0

    def relink(self, to: SequenceRef | None) -> None:
        """Push to `to` from now on, as the client has asked."""
        self.set_next(to)
        self.is_cut_off, self._num_refused = False, 0
        self.num_links = min(self.num_links + 1, limits.MAX_LINK_UPDATES)

    def set_next(self, to: SequenceRef | None) -> None:
        if to == self.next:
            return
        if self.next is not None:
            self._push_connections.unlink(self.next.peer_id, (self.client.peer_id, self.next.sequence_id))
        self.next = to
        if to is not None and to != self._own:
            self._push_connections.link(to.peer_id, (self.client.peer_id, to.sequence_id), self)

    @property
    def is_sending(self) -> bool:
        """Return whether something waits to be sent to the next server."""
        to = self.next
        return to is not None and self._push_connections.is_sending(to.peer_id, (self.client.peer_id, to.sequence_id))

    async def room(self) -> None:
        """Wait while much data to the next server is unsent."""
        if self.next is not None:
            await self._push_connections.room(self.next.peer_id)

    def push_rows(self, step: CheckedStep, rows: Rows, spent_ms: Spent) -> None:
        """Send a step's outputs to the next server, which must be set, or cut the session off from it."""
        assert self.next is not None
        frame = Push(
            client_peer_id=self.client.peer_id,
            sequence_id=self.next.sequence_id,
            position=step.position,
            want=step.want,
            draw=step.draw,
            rows=rows,
            source_id=self._own.sequence_id,
            upstream_ms=(*step.upstream_ms, spent_ms)[-limits.MAX_UPSTREAM :] if step.is_decode else (),
            num_drafts=step.num_drafts,
        )
        try:
            self._push_connections.push(self.next.peer_id, frame)
        except SwarmError as error:
            logger.debug("%s takes no pushes: %s", self.next.peer_id, error)
            self._cut_off()

    def push_tokens(self, position: int, token_ids: Sequence[int], draw: TokenDraw) -> bool:
        """Push the drawn token, and the drafts after it, to the first server, with the draw that follows. Return False
        if the client has to feed the token instead."""
        to = self.next
        if to is None:
            return False
        payload = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
        frame = Push(
            client_peer_id=self.client.peer_id,
            sequence_id=to.sequence_id,
            position=position,
            want="token",
            draw=draw,
            rows=Rows(codec=TOKENS, num_rows=len(token_ids), num_columns=0, payload=payload),
            source_id=self._own.sequence_id,
            num_drafts=len(token_ids) - 1,
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

    def push_failed(self, error: SwarmError, *, is_linked: bool) -> None:
        """Record that a push was lost. If `is_linked`, later pushes may still arrive."""
        self._num_refused += 1
        if not is_linked or self._num_refused >= MAX_REFUSED:
            self._cut_off()
        self._on_failed(error)

    def _cut_off(self) -> None:
        self.set_next(None)
        self.is_cut_off = True
