"""The two ends of one conversation between simulated peers: ordered messages, a bounded window, failures in wire form.

A call is a conversation of one message in each direction; a stream may have any number. The window, the pieces of a
message, their cost, and how they are kept until they are taken are those of the real wire (`framing`), so that two
peers that both send before either reads deadlock here as they would there.
`memory_link` carries the bytes, and `memory_network` has the peers. An end belongs to the task that uses it.
`handler_task` belongs to the network that serves the conversation; an end only cancels it, when the caller leaves or
the connection breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.failure_messages import decode_failure, encode_failure

from swarm.network import framing
from swarm.network.framing import Kind, UnreadMessages
from swarm.network.interface import EndOfStream, cut_off
from swarm.network.link_meter import LinkMeter
from swarm.network.memory.memory_link import Pipe
from swarm.network.peer_budgets import UnreadBudget


class StreamEnd:
    """One end of a conversation with `peer_id`. It implements `interface.Stream` and `peer_budgets.UnreadHolder`.

    `timeout_s` bounds each send and receive of a stream's caller. A call and a handler have None. What waits to be
    received is charged to `unread`.
    """

    def __init__(
        self, peer_id: str, pipe: Pipe, links: LinkMeter, unread: UnreadBudget, *, timeout_s: float | None
    ) -> None:
        self.peer_id = peer_id
        self.other: StreamEnd
        self.handler_task: asyncio.Task[None] | None = None
        self.is_call = False  # set at the caller's end only
        self.unread = UnreadMessages(self, unread, limits.MAX_MESSAGE_BYTES)
        self._pipe = pipe
        self._links = links
        self._timeout_s = timeout_s
        self._credit_bytes = framing.WINDOW_BYTES
        self._accepted = False
        self._finished = False
        self._is_in_message = False  # whether more pieces have to follow the last one that was sent
        self._at_end: Exception | None = None  # raised by receive once all is read
        self._broken: SwarmError | None = None  # raised by send
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    async def send(self, message: bytes) -> None:
        if len(message) > limits.MAX_MESSAGE_BYTES:
            raise ValueError(f"message of {len(message)} bytes, more than {limits.MAX_MESSAGE_BYTES}")
        if self._finished and self._broken is None:
            raise ValueError("send after finish")
        if self._is_in_message and self._broken is None:
            raise cut_off(self.peer_id)
        until_s: float | None = None
        for kind, piece in framing.pieces(message):
            num_bytes = framing.cost(len(piece))
            # nearly all messages have room, and need no timer
            if self._credit_bytes < num_bytes and self._broken is None:
                if until_s is None and self._timeout_s is not None:
                    until_s = asyncio.get_running_loop().time() + self._timeout_s
                await self._wait_for_room(num_bytes, until_s)
            if self._broken is not None:
                raise self._broken.with_traceback(None)
            self._credit_bytes -= num_bytes
            self._is_in_message = kind is Kind.MORE
            # no copy, as on the real wire: a sender that changes its buffer too early spoils the message
            self._put(len(piece), partial(self.other._take, kind, piece))

    async def receive(self) -> bytes:
        message = self._take_message()
        if message is None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    while (message := self._take_message()) is None:
                        if self._at_end is not None:
                            raise self._at_end.with_traceback(None)
                        self._news.clear()
                        await self._news.wait()
            except TimeoutError:
                raise self._timed_out("sent nothing") from None
        return message

    async def finish(self) -> None:
        if self._is_in_message and self._broken is None:
            raise cut_off(self.peer_id)
        if not self._finished:
            self._finished = True
            self._put(0, lambda: self.other._end(EndOfStream()))

    # --- for the network that connects the two ends -----------------------------------------------------------------

    def open(self, method: str, present: Callable[[], None]) -> None:
        """Ask for a conversation; `present` is called when the request has arrived."""
        self._put(len(method), present)

    def accept(self) -> None:
        self._put(0, self.other._take_acceptance)

    async def accepted(self) -> None:
        """Wait until the other side has accepted. Raises the error with which it refused, PeerTimeout or
        PeerUnreachable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._accepted:
                    if self._broken is not None:
                        raise self._broken
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise self._timed_out("did not accept the stream") from None

    def complete(self) -> None:
        """End the stream, since its handler has returned. The other side still reads what was sent, then gets
        EndOfStream; sending more raises PeerUnreachable there."""
        self._leave()
        gone = PeerUnreachable("the peer has ended the stream", peer_id=self.other.peer_id)
        self._put(0, lambda: self.other._close(gone, EndOfStream()))

    def fail(self, error: BaseException) -> None:
        """Have `error` raised at the other side, once it has read what was sent before."""
        wire = encode_failure(error)
        self._leave()
        self._put(len(wire), lambda: self.other.break_off(decode_failure(wire, self.other.peer_id)))

    def hang_up(self) -> None:
        """Tell the other side that this side has left the conversation."""
        self._leave()
        self._pipe.drop(self)
        left = PeerUnreachable("the peer has left", peer_id=self.other.peer_id)
        # not `_put`, which sends nothing once this end is broken: the other side may not know that
        self._pipe.put(self, 0, lambda: self.other.break_off(left))

    def give_way(self, refusal: PeerRefused) -> None:
        self.fail(refusal)
        self._close(refusal, refusal)

    def break_off(self, error: SwarmError) -> None:
        """Break this end. Sending raises `error` at once. Receiving raises it after the messages that have arrived."""
        self._close(error, error)
        if self.handler_task is not None and not self.handler_task.cancelling():
            self.handler_task.cancel()

    def _leave(self) -> None:
        self._finished = True
        self.unread.drop()

    def _close(self, error: SwarmError, at_end: Exception) -> None:
        if self._broken is None:
            self._broken = error
            self._end(at_end)
            self._room.set()

    def _end(self, at_end: Exception) -> None:
        if self._at_end is None:
            self._at_end = at_end
            self._news.set()

    def _put(self, num_bytes: int, deliver: Callable[[], None]) -> None:
        if self._broken is None:
            self._pipe.put(self, num_bytes, deliver)

    async def _wait_for_room(self, num_bytes: int, until_s: float | None) -> None:
        """Wait until there is credit for `num_bytes`, or the stream is broken. Raises PeerTimeout."""
        try:
            async with asyncio.timeout_at(until_s):
                while self._broken is None and self._credit_bytes < num_bytes:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            # part of the message may have been sent, so the stream cannot go on
            self.break_off(self._timed_out("took no more data"))
            raise self._timed_out("took no more data") from None

    def _take_acceptance(self) -> None:
        self._accepted = True
        self._room.set()

    def _take_credit(self, num_bytes: int) -> None:
        self._credit_bytes += num_bytes
        self._room.set()

    def _take(self, kind: Kind, piece: memoryview) -> None:
        self._links.heard(self.peer_id)
        self._links.received(self.peer_id, len(piece), self.other._pipe.came_s)
        if self._at_end is None and self.unread.announce(len(piece)):
            self.unread.add(kind, piece)
            self._news.set()

    def _take_message(self) -> bytes | None:
        try:
            message = self.unread.take()
        except PeerViolation as violation:
            self.break_off(violation)
            raise
        if granted := self.unread.credit():
            self._put(0, lambda: self.other._take_credit(granted))
        return message

    def _timed_out(self, what: str) -> PeerTimeout:
        return PeerTimeout(f"the peer {what} within {self._timeout_s:g} s", peer_id=self.peer_id)
