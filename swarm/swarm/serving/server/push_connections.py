"""Connections to the servers that come next: what one server's sessions forward to others.

A connection is opened when the first session is linked to a peer, so that it is there when the first rows are, and
closed some time after the last session is unlinked. Clients name the peers that a server dials, so the number of peers
is bounded for each client and for all, and a peer that could not be reached, or has left, is not dialled again at once.
A push that cannot be sent, or is refused, is reported to its session by the callback that it was linked with. Nothing
is sent twice: the client has a copy and feeds the next server itself. `run` owns the connections. Everything else is
called in its loop and does not wait, except `room`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.frames import num_bytes
from swarm_protocol.session_frames import Frame, Push, PushRefused

from swarm.network.interface import Network
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, open_stream

logger = logging.getLogger(__name__)

MAX_PEERS = 256
"""Peers at once. Clients name them, and each costs a stream."""

MAX_PEERS_PER_CLIENT = 32
"""A gateway's routes go on from here to a few servers; no client may take the connections meant for others."""

REST_S = 5.0
"""Half the time for which clients avoid a broken link: earlier requests come only from clients that want us to dial."""

UNUSED_S = 30.0
"""Time for which a connection stays open without a session that is linked: the next session is often soon."""

SequenceKey: TypeAlias = tuple[str, bytes]
"""The client's peer id, and the id of the session at the next server."""


class DialLimiter:
    """Bound the peers that clients have this server dial."""

    def __init__(self) -> None:
        self._clients: dict[str, list[str]] = {}  # of each dialled peer, one for each time that it is
        self._resting: dict[str, tuple[str, float]] = {}  # for which client they were dialled, and until when

    def begin(self, peer_id: str, client: str) -> bool:
        """Return whether `client` may have us dial the peer now; if so, `end` must follow."""
        now_s = asyncio.get_running_loop().time()
        self._resting = {peer: rest for peer, rest in self._resting.items() if rest[1] > now_s}
        if peer_id in self._resting:
            return False
        if peer_id not in self._clients:
            named = [clients[0] for clients in self._clients.values()]
            named += [for_client for for_client, _ in self._resting.values()]
            if len(named) >= MAX_PEERS or named.count(client) >= MAX_PEERS_PER_CLIENT:
                # no warning: a client may name any number of peers
                logger.debug("%d peers are dialled, and %d of them for %s", len(named), named.count(client), client)
                return False
        self._clients.setdefault(peer_id, []).append(client)
        return True

    def end(self, peer_id: str, client: str, *, rests: bool) -> None:
        """End one use of the peer. `rests`: it could not be reached, or has left, and is not dialled again for
        REST_S."""
        clients = self._clients[peer_id]
        clients.remove(client)
        if not clients:
            del self._clients[peer_id]
        if rests:
            self._resting[peer_id] = client, asyncio.get_running_loop().time() + REST_S


class PushFailed(Protocol):
    """Report to a session that one of its pushes was lost. `is_linked`: later pushes may still arrive."""

    def __call__(self, error: SwarmError, *, is_linked: bool) -> None: ...


@dataclass(slots=True, eq=False)
class _Outgoing:
    """Opened for `client`, and shared with others. `waiting` until the connection is open."""

    client: str
    connection: MultiplexedConnection | None = None
    waiting: list[Push] = field(default_factory=list)
    num_waiting_bytes: int = 0
    linked: dict[SequenceKey, PushFailed] = field(default_factory=dict)
    close_timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None


class PushConnections:
    """Own the connections to next servers, for all sessions of one model."""

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

    def link(self, peer_id: str, key: SequenceKey, failed: PushFailed) -> None:
        """Let a session push to the peer from now on, unless that is one peer too many."""
        outgoing = self._outgoing.get(peer_id)
        if outgoing is None:
            client = key[0]
            if not self.dial_limiter.begin(peer_id, client):
                return
            outgoing = self._outgoing[peer_id] = _Outgoing(client)
            self._wanted.put_nowait(peer_id)
        if outgoing.close_timer is not None:
            outgoing.close_timer.cancel()
            outgoing.close_timer = None
        outgoing.linked[key] = failed

    def unlink(self, peer_id: str, key: SequenceKey) -> None:
        outgoing = self._outgoing.get(peer_id)
        if outgoing is None or outgoing.linked.pop(key, None) is None or outgoing.linked:
            return
        outgoing.close_timer = asyncio.get_running_loop().call_later(UNUSED_S, self._close, peer_id, outgoing)

    def push(self, peer_id: str, push: Push) -> None:
        """Raises PeerError if it cannot be sent."""
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
        """Return whether a push would leave at once."""
        outgoing = self._outgoing.get(peer_id)
        return outgoing is not None and outgoing.connection is not None

    def is_coming(self, peer_id: str) -> bool:
        """Return whether there is a connection, or will be."""
        return peer_id in self._outgoing

    async def room(self, peer_id: str) -> None:
        """Wait while much is unsent to this peer. `push` says whether it can be sent."""
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
        for failed in list(outgoing.linked.values()):
            failed(error or PeerUnreachable("the connection is closed", peer_id=peer_id), is_linked=False)

    def _on_frame(self, frame: Frame, peer_id: str, outgoing: _Outgoing) -> None:
        if not isinstance(frame, PushRefused):
            raise PeerViolation(f"a server sends {type(frame).__name__} to the one before it", peer_id=peer_id)
        failed = outgoing.linked.get((frame.client_peer_id, frame.sequence_id))
        if failed is not None:
            failed(frame.error(peer_id), is_linked=True)

    def _close(self, peer_id: str, outgoing: _Outgoing) -> None:
        # a session that links from now on gets a new connection
        del self._outgoing[peer_id]
        if outgoing.task is not None:
            outgoing.task.cancel()
        else:
            self.dial_limiter.end(peer_id, outgoing.client, rests=False)
