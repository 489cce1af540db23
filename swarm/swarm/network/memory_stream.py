"""Two ends of one conversation between simulated peers: ordered messages, a bounded window, failures in wire form.

A call is a conversation of one message each way; a stream may have any number. The handler's end is cancelled when the
caller leaves or the connection breaks. Bytes and their timing are left to `memory_link`, peers to `memory`.
An end belongs to the task that uses it; `handler_task` belongs to the network that serves it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, SwarmError
from swarm_protocol.failure import decode_failure, encode_failure

from swarm.network.interface import EndOfStream
from swarm.network.memory_link import Pipe

WINDOW_BYTES = 4 * 2**20
"""What may be sent ahead of the reader. Keeps a 200 Mbit/s link with 100 ms busy; a larger message goes alone."""

WINDOW_MESSAGES = 64
"""The same for small messages, whose bytes would never fill the window."""


class End:
    """One side's view of a conversation with `peer_id`. Implements `interface.Stream`."""

    def __init__(self, peer_id: str, pipe: Pipe, *, timeout_s: float | None) -> None:
        self.peer_id = peer_id
        self.handler_task: asyncio.Task[None] | None = None
        self.other: End
        self._pipe = pipe
        self._timeout_s = timeout_s
        self._inbox: deque[bytes] = deque()
        self._received_end: Exception | None = None
        self._broken: SwarmError | None = None
        self._finished = False
        self._ahead: deque[int] = deque()
        self._accepted = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    def open(self, method: str, deliver: Callable[[], None]) -> None:
        """Ask the other side for a conversation; `deliver` presents it there."""
        self._put(len(method), deliver)

    def accept(self) -> None:
        self._put(0, self.other._take_acceptance)

    async def accepted(self) -> None:
        """Wait until the other side has accepted. Raises what it refused with."""
        await self._wait(self._room, lambda: self._accepted or self._broken is not None, "the stream was not accepted")
        if self._broken is not None and not self._accepted:
            raise self._broken

    async def send(self, message: bytes) -> None:
        if len(message) > limits.MAX_MESSAGE_BYTES:
            raise ValueError(f"message has {len(message)} bytes, more than {limits.MAX_MESSAGE_BYTES}")
        if self._finished:
            raise ValueError("this side has finished sending")
        await self._wait(self._room, self._has_room, "no room for the next message")
        if self._broken is not None:
            raise self._broken
        copy = bytes(message)
        self._ahead.append(len(copy))
        self._put(len(copy), lambda: self.other._take(copy))

    async def receive(self) -> bytes:
        await self._wait(self._news, self._has_news, "nothing received")
        if not self._inbox:
            assert self._received_end is not None
            raise self._received_end
        message = self._inbox.popleft()
        self.other._make_room()
        return message

    async def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._put(0, lambda: self.other._end(EndOfStream()))

    def complete(self) -> None:
        """The handler has returned: the other side reads what was sent, then the end; sending it more is an error."""
        self._finished = True
        gone = PeerUnreachable("the peer's handler has returned", peer_id=self.other.peer_id)
        self._put(0, lambda: self.other._close(gone, EndOfStream()))

    def fail(self, error: BaseException) -> None:
        """Have `error` raised at the other side, after the messages already sent."""
        wire = encode_failure(error)
        self._finished = True
        self._put(len(wire), lambda: self.other.break_off(decode_failure(wire, self.other.peer_id)))

    def hang_up(self) -> None:
        """Tell the other side that nobody reads or writes here any more."""
        self._finished = True
        self._pipe.drop(self)
        self._put(0, lambda: self.other.break_off(PeerUnreachable("the peer has left", peer_id=self.other.peer_id)))

    def break_off(self, error: SwarmError) -> None:
        """What has arrived can still be read; then, and for sending at once, `error` is raised here."""
        self._close(error, error)

    def _close(self, error: SwarmError, at_end: Exception) -> None:
        if self._broken is None:
            self._broken = error
            self._end(at_end)
            self._room.set()
            if self.handler_task is not None:
                self.handler_task.cancel()

    def _put(self, num_bytes: int, deliver: Callable[[], None]) -> None:
        if self._broken is None:
            self._pipe.put(self, num_bytes, deliver)

    def _take_acceptance(self) -> None:
        self._accepted = True
        self._room.set()

    def _take(self, message: bytes) -> None:
        if self._received_end is None:
            self._inbox.append(message)
            self._news.set()

    def _end(self, error: Exception) -> None:
        if self._received_end is None:
            self._received_end = error
            self._news.set()

    def _make_room(self) -> None:
        self._ahead.popleft()
        self._room.set()

    def _has_room(self) -> bool:
        fits = sum(self._ahead) < WINDOW_BYTES and len(self._ahead) < WINDOW_MESSAGES
        return fits or self._broken is not None

    def _has_news(self) -> bool:
        return bool(self._inbox) or self._received_end is not None

    async def _wait(self, event: asyncio.Event, ready: Callable[[], bool], complaint: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while not ready():
                    event.clear()
                    await event.wait()
        except TimeoutError:
            raise PeerTimeout(f"{complaint} within {self._timeout_s} s", peer_id=self.peer_id) from None
