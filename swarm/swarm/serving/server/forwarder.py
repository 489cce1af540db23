"""Lanes to the servers that come next: what one server's seats hand on to others.

A lane is opened when the first seat is linked to a peer, so that it is there when the first rows are, and closed a
while after the last one is unlinked. Clients name whom we dial: each may name only so many, and a peer that could not
be reached, or has left, is not dialled again at once. A push that cannot be sent, or is refused, is told to its seat by
the callback that it was linked with; nothing is sent twice, for the client has a copy and feeds the next server itself.
`run` owns the lanes. Everything else is called in its loop and does not wait, but for `room`.
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
from swarm.serving.server.dial_limiter import Dials
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, open_stream

logger = logging.getLogger(__name__)

LINGER_S = 30.0
"""How long a lane stays open without a seat that is linked: the next session is often soon."""

SeatKey: TypeAlias = tuple[str, bytes]
"""The client's peer id, and the id of the seat at the next server."""


class PushFailed(Protocol):
    """Tells a seat that something it pushed was lost. `is_linked`: later pushes may still arrive."""

    def __call__(self, error: SwarmError, *, is_linked: bool) -> None: ...


@dataclass(slots=True, eq=False)
class _Outgoing:
    """Opened for `client`, and shared with others. `waiting` until the lane is open."""

    client: str
    lane: MultiplexedConnection | None = None
    waiting: list[Push] = field(default_factory=list)
    num_waiting_bytes: int = 0
    linked: dict[SeatKey, PushFailed] = field(default_factory=dict)
    close_timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None


class Pushes:
    def __init__(self, network: Network, model: str) -> None:
        self.dials = Dials()
        self._network = network
        self._model = model
        self._outgoing: dict[str, _Outgoing] = {}
        self._wanted: asyncio.Queue[str] = asyncio.Queue()

    @property
    def peer_id(self) -> str:
        """Of the server that pushes."""
        return self._network.peer_id

    @property
    def num_lanes(self) -> int:
        return len(self._outgoing)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                peer_id = await self._wanted.get()
                outgoing = self._outgoing.get(peer_id)
                if outgoing is None or outgoing.task is not None:
                    continue
                outgoing.task = tasks.create_task(self._keep(peer_id, outgoing), name=f"push to {peer_id}")

    def link(self, peer_id: str, key: SeatKey, failed: PushFailed) -> None:
        """From now on a seat may push there; or it may not, if that is one peer too many."""
        outgoing = self._outgoing.get(peer_id)
        if outgoing is None:
            client = key[0]
            if not self.dials.begin(peer_id, client):
                return
            outgoing = self._outgoing[peer_id] = _Outgoing(client)
            self._wanted.put_nowait(peer_id)
        if outgoing.close_timer is not None:
            outgoing.close_timer.cancel()
            outgoing.close_timer = None
        outgoing.linked[key] = failed

    def unlink(self, peer_id: str, key: SeatKey) -> None:
        outgoing = self._outgoing.get(peer_id)
        if outgoing is None or outgoing.linked.pop(key, None) is None or outgoing.linked:
            return
        outgoing.close_timer = asyncio.get_running_loop().call_later(LINGER_S, self._close, peer_id, outgoing)

    def push(self, peer_id: str, push: Push) -> None:
        """Raises PeerError if it cannot be sent."""
        outgoing = self._outgoing.get(peer_id)
        if outgoing is None or (push.client_peer_id, push.sequence_id) not in outgoing.linked:
            raise PeerUnreachable("there is no lane to the next server", peer_id=peer_id)
        if outgoing.lane is not None:
            outgoing.lane.send(push)
            return
        outgoing.num_waiting_bytes += num_bytes(push)
        if outgoing.num_waiting_bytes > limits.MAX_MESSAGE_BYTES:
            raise PeerRefused("too much waits for a lane to the next server", peer_id=peer_id)
        outgoing.waiting.append(push)

    def is_open(self, peer_id: str) -> bool:
        """Whether a push would leave at once."""
        outgoing = self._outgoing.get(peer_id)
        return outgoing is not None and outgoing.lane is not None

    def is_coming(self, peer_id: str) -> bool:
        """Whether there is a lane, or will be."""
        return peer_id in self._outgoing

    async def room(self, peer_id: str) -> None:
        """Wait while much is unsent to this peer. Whether it can be sent is told by `push`."""
        outgoing = self._outgoing.get(peer_id)
        if outgoing is not None and outgoing.lane is not None:
            with contextlib.suppress(SwarmError):
                await outgoing.lane.room()

    async def _keep(self, peer_id: str, outgoing: _Outgoing) -> None:
        error: SwarmError | None = None
        try:
            async with open_stream(self._network, peer_id, self._model) as stream:
                outgoing.lane = lane = MultiplexedConnection(stream, peer_id)
                for push in outgoing.waiting:
                    lane.send(push)
                outgoing.waiting.clear()
                await lane.run(lambda frame: self._hear(frame, peer_id, outgoing))
                error = lane.error
        except SwarmError as refusal:
            error = refusal
        finally:
            has_left = self._outgoing.get(peer_id) is outgoing
            if has_left:
                del self._outgoing[peer_id]
            self.dials.end(peer_id, outgoing.client, rests=has_left)
            if outgoing.close_timer is not None:
                outgoing.close_timer.cancel()
        for failed in list(outgoing.linked.values()):
            failed(error or PeerUnreachable("the lane is closed", peer_id=peer_id), is_linked=False)

    def _hear(self, frame: Frame, peer_id: str, outgoing: _Outgoing) -> None:
        if not isinstance(frame, PushRefused):
            raise PeerViolation(f"a server sends {type(frame).__name__} to the one before it", peer_id=peer_id)
        failed = outgoing.linked.get((frame.client_peer_id, frame.sequence_id))
        if failed is not None:
            failed(frame.error(peer_id), is_linked=True)

    def _close(self, peer_id: str, outgoing: _Outgoing) -> None:
        # whoever links from now on gets a lane of its own
        del self._outgoing[peer_id]
        if outgoing.task is not None:
            outgoing.task.cancel()
        else:
            self.dials.end(peer_id, outgoing.client, rests=False)
