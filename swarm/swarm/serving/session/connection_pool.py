"""A client's lanes to servers: opened when a first session needs one, shared by all, closed a while after the last.

One per client; `close` ends every lane and the task that owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from swarm_protocol.errors import PeerUnreachable, SwarmError
from swarm_protocol.session_frames import Frame, OpenSequence, Push, PushRefused, ServerLeaving

from swarm.network.interface import Network, Stream
from swarm.serving.wire.multiplexed_connection import MultiplexedConnection, open_stream

IDLE_S = 30.0
"""Time for a person to read an answer and ask again, without dialling anew."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The lane has ended, and with it the seat."""

    error: SwarmError


Hear: TypeAlias = Callable[[Frame | ConnectionLost], None]


class ClientConnection:
    """Frames of a server, each given to the seat that it is for."""

    def __init__(self, stream: Stream, peer_id: str, idle_s: float) -> None:
        self._lane = MultiplexedConnection(stream, peer_id)
        self._seats: dict[bytes, Hear] = {}
        self._idle_s = idle_s
        self._idle: asyncio.TimerHandle | None = None
        self._wait_for_seats()

    @property
    def is_over(self) -> bool:
        return self._lane.is_over

    def attach(self, sequence_id: bytes, hear: Hear) -> None:
        """From now on `hear` is told what comes for the seat, and of the lane's end. Raises what has ended it."""
        if self._lane.error is not None:
            raise self._lane.error.with_traceback(None)
        self._seats[sequence_id] = hear
        if self._idle is not None:
            self._idle.cancel()

    def detach(self, sequence_id: bytes) -> None:
        self._seats.pop(sequence_id, None)
        if not self._seats:
            self._wait_for_seats()

    def send(self, frame: Frame) -> None:
        """Nothing happens once the lane has ended: its seats are told of that."""
        if self._lane.error is None:
            self._lane.send(frame)

    async def run(self) -> None:
        """Until it ends."""
        try:
            await self._lane.run(self._on_frame)
        finally:
            if self._idle is not None:
                self._idle.cancel()
            error = self._lane.error or PeerUnreachable("the lane is closed", peer_id=self._lane.peer_id)
            self._tell_all(ConnectionLost(error))

    def _on_frame(self, frame: Frame) -> None:
        if isinstance(frame, ServerLeaving):
            self._tell_all(frame)
        elif not isinstance(frame, OpenSequence | Push | PushRefused) and (hear := self._seats.get(frame.sequence_id)):
            hear(frame)

    def _tell_all(self, news: ServerLeaving | ConnectionLost) -> None:
        for hear in list(self._seats.values()):
            hear(news)

    def _wait_for_seats(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._lane.end)


class ConnectionPool:
    def __init__(self, network: Network, *, idle_s: float = IDLE_S) -> None:
        self._network = network
        self._idle_s = idle_s
        self._openings: dict[tuple[str, str], asyncio.Future[ClientConnection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, peer_id: str, model: str) -> ClientConnection:
        """The lane to a server of `model`. Raises PeerError, or what the server refuses it with."""
        opening = self._openings.get((peer_id, model))
        if opening is None or _is_over(opening):
            opening = self._open(peer_id, model)
        # several may wait for it, and one of them leave
        return await asyncio.shield(opening)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _open(self, peer_id: str, model: str) -> asyncio.Future[ClientConnection]:
        loop = asyncio.get_running_loop()
        lane: asyncio.Future[ClientConnection] = loop.create_future()
        task = loop.create_task(self._live(peer_id, model, lane), name=f"lane to {peer_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._openings[peer_id, model] = lane
        return lane

    async def _live(self, peer_id: str, model: str, opened: asyncio.Future[ClientConnection]) -> None:
        try:
            async with open_stream(self._network, peer_id, model) as stream:
                lane = ClientConnection(stream, peer_id, self._idle_s)
                opened.set_result(lane)
                await lane.run()
        except SwarmError as error:
            if not opened.done():
                opened.set_exception(error)
                # whoever asked may have left meanwhile
                opened.exception()
        finally:
            if not opened.done():
                opened.cancel()
            if self._openings.get((peer_id, model)) is opened:
                del self._openings[peer_id, model]


def _is_over(lane: asyncio.Future[ClientConnection]) -> bool:
    return lane.done() and (lane.cancelled() or lane.exception() is not None or lane.result().is_over)
