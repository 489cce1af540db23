"""Keeps one client's connections to servers, which its sessions share.

A server has one connection for each model. It opens when a first session needs it, and closes a while after the last
session. Each frame goes to its sequence. If a connection ends, all its sequences are told.

The pool is touched only from its client's event loop; `close` ends its tasks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from swarm_protocol.errors import PeerUnreachable, SessionError, SwarmError
from swarm_protocol.session_frames import Frame, OpenSequence, Push, PushRefused, RoomFreed, ServerLeaving

from swarm.ended_tasks import end_tasks
from swarm.network.interface import Stream, StreamOpener
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, open_stream

IDLE_S = 30.0
"""Seconds that an unused connection stays open: a person may read an answer and ask again without another dial."""

ROOM_S = 0.2
"""Minimum seconds between two frames by which a server has this client ask for room again. Others are ignored, so that
a server cannot make it ask without end."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection has ended, and with it the sequence."""

    error: SwarmError


OnMessage: TypeAlias = Callable[[Frame | ConnectionLost], None]


class ClientConnection:
    """A connection to one server, which passes each frame to its sequence."""

    def __init__(self, stream: Stream, peer_id: str, on_room: Callable[[str], None]) -> None:
        self._connection = MultiplexedConnection(stream, peer_id)
        self._on_room = on_room
        self._room_s = -math.inf  # when the server last said that there may be room
        self._sequences: dict[bytes, OnMessage] = {}
        self._idle: asyncio.TimerHandle | None = None
        self._close_when_idle()

    @property
    def is_over(self) -> bool:
        return self._connection.is_over

    def attach(self, sequence_id: bytes, on_message: OnMessage) -> None:
        """Call `on_message` with each frame of the sequence, and when the connection ends. Raises the error that has
        ended the connection."""
        if self._connection.error is not None:
            raise self._connection.error.with_traceback(None)
        self._sequences[sequence_id] = on_message
        if self._idle is not None:
            self._idle.cancel()

    def detach(self, sequence_id: bytes) -> None:
        self._sequences.pop(sequence_id, None)
        if not self._sequences:
            self._close_when_idle()

    def send(self, frame: Frame) -> None:
        """Send a frame. Does nothing once the connection has ended, which its sequences are told."""
        if self._connection.error is None:
            self._connection.send(frame)

    def fail(self, error: SwarmError) -> None:
        """End the connection now; its sequences are told of `error`."""
        self._connection.fail(error)

    async def run(self) -> None:
        """Send and receive until the connection ends."""
        try:
            await self._connection.run(self._on_frame)
        finally:
            if self._idle is not None:
                self._idle.cancel()
            self._notify_all(ConnectionLost(self._connection.error or _closed(self._connection.peer_id)))

    def _on_frame(self, frame: Frame) -> None:
        if isinstance(frame, ServerLeaving):
            self._notify_all(frame)
        elif isinstance(frame, RoomFreed):
            if (now_s := asyncio.get_running_loop().time()) >= self._room_s + ROOM_S:
                self._room_s = now_s
                self._on_room(self._connection.peer_id)
        elif not isinstance(frame, OpenSequence | Push | PushRefused) and (
            on_message := self._sequences.get(frame.sequence_id)
        ):
            on_message(frame)

    def _notify_all(self, news: ServerLeaving | ConnectionLost) -> None:
        for on_message in list(self._sequences.values()):
            on_message(news)

    def _close_when_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._connection.end)


class ConnectionPool:
    """Keeps one open connection to each server and model that sessions use. `on_room` is called with a server that says
    that there may be room again."""

    def __init__(self, network: StreamOpener, *, on_room: Callable[[str], None] = lambda _peer_id: None) -> None:
        self._network = network
        self._on_room = on_room
        self._openings: dict[tuple[str, str], asyncio.Future[ClientConnection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def get(self, peer_id: str, model: str) -> ClientConnection:
        """Return the connection to a server of `model`. Raises PeerError, or the error with which the server
        refuses."""
        if self._is_closed:
            raise _closed(peer_id)
        opening = self._openings.get((peer_id, model))
        if opening is None or _is_over(opening):
            opening = self._open(peer_id, model)
        # several sessions may wait for the connection, and one of them may be cancelled
        return await asyncio.shield(opening)

    def drop(self, peer_id: str, error: SwarmError) -> None:
        """End the connections to a peer, also those that are being opened. Their sequences get `error`."""

        def end(opening: asyncio.Future[ClientConnection]) -> None:
            if opening.exception() is None:
                opening.result().fail(error)

        for (each, _), opening in list(self._openings.items()):
            if each == peer_id:
                opening.add_done_callback(end)

    async def close(self) -> None:
        self._is_closed = True
        await end_tasks(*self._tasks)

    def _open(self, peer_id: str, model: str) -> asyncio.Future[ClientConnection]:
        loop = asyncio.get_running_loop()
        connection: asyncio.Future[ClientConnection] = loop.create_future()
        task = loop.create_task(self._keep_open(peer_id, model, connection), name=f"connection to {peer_id}")
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            _fail(connection, _closed(peer_id))  # after a defect, or if the task was cancelled, perhaps before it began
            if self._openings.get((peer_id, model)) is connection:
                del self._openings[peer_id, model]

        task.add_done_callback(end)
        self._openings[peer_id, model] = connection
        return connection

    async def _keep_open(self, peer_id: str, model: str, opened: asyncio.Future[ClientConnection]) -> None:
        try:
            async with open_stream(self._network, peer_id, model) as stream:
                connection = ClientConnection(stream, peer_id, self._on_room)
                opened.set_result(connection)
                await connection.run()
        except SwarmError as error:
            _fail(opened, error)


def _is_over(opening: asyncio.Future[ClientConnection]) -> bool:
    return opening.done() and (opening.exception() is not None or opening.result().is_over)


def _fail(opening: asyncio.Future[ClientConnection], error: SwarmError) -> None:
    if not opening.done():
        opening.set_exception(error)
        # marks the exception as retrieved: the session that asked may have been cancelled meanwhile
        opening.exception()


def _closed(peer_id: str) -> PeerUnreachable:
    return PeerUnreachable("the connection is closed", peer_id=peer_id)


def client_closed() -> SessionError:
    """Return the error of whoever still waits for something when the client is closed."""
    return SessionError("the client has been closed", remedy="use it inside its `with` block")
