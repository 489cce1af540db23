"""The unary connection: small calls multiplexed over one persistent connection to the libp2p daemon.

It refuses calls of unknown protocols, cancels handlers whose caller has left, and notices the daemon's death.
`UnaryConnection.run` is the one task that reads the connection. It owns all handlers, and bounds their number for each
peer and in all. A handler counts until the daemon's socket has room again, so the bound holds for waiting answers, too.
Many calls of one peer begin one after the other in different turns of the loop: an answer may take milliseconds, and
calls of other peers come in between. The caller bounds sizes and times, and interprets the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakValueDictionary

from swarm_protocol.proto import p2pd_pb2

from swarm.network.interface import NotServed
from swarm.network.libp2p.daemon_control import Control, ControlError, raise_if_error, read_message, write_message
from swarm.network.multiaddr import peer_id_bytes, peer_id_text
from swarm.network.peer_budgets import PeerSlots, call_slots

NOT_SERVED, BUSY, FAILED = "not served", "busy", "failed"
"""Errors that the connection itself answers with. BUSY: the peer has, or all peers together have, as many calls running
here as `peer_budgets` allows. FAILED: the handler has a bug."""

CANCEL_AGAIN_S = 1.0
"""Time after which a cancellation is sent again: the daemon loses one that comes before it has begun the call."""

UnaryAnswer = Callable[[str, bytes], Awaitable[bytes]]
"""`async answer(peer_id, request) -> response`. It may raise `NotServed`. Any other exception is a bug, which is logged
and answered with `FAILED`."""

logger = logging.getLogger(__name__)


class UnaryConnectionClosed(Exception):
    """The daemon has ended, so no pending call will be answered."""


class RemoteCallError(Exception):
    """The other side answered a call with an error."""


class UnaryConnection:
    """Sends calls to the daemon over one connection, and runs a handler for each call that comes back over it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._answers: dict[str, UnaryAnswer] = {}
        self._pending: dict[bytes, asyncio.Future[Any]] = {}
        self._handlers: dict[bytes, asyncio.Task[None]] = {}
        self._slots: PeerSlots[bytes] = call_slots()
        self._turns = WeakValueDictionary[bytes, asyncio.Lock]()  # of peers with several calls
        self._closed = False

    @classmethod
    async def open(cls, control: Control) -> UnaryConnection:
        reader, writer = await control.open()
        try:
            write_message(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.PERSISTENT_CONN_UPGRADE))
            raise_if_error(await read_message(reader, p2pd_pb2.Response))
        except BaseException:
            writer.transport.abort()
            raise
        return cls(reader, writer)

    async def call(self, peer_id: str, protocol: str, request: bytes) -> bytes:
        """Call a peer, and return its response. Raises UnaryConnectionClosed, RemoteCallError, or ControlError if the
        daemon cannot reach the peer.

        Cancelling the call cancels the handler at the other side.
        """
        call = p2pd_pb2.CallUnaryRequest(peer=peer_id_bytes(peer_id), proto=protocol, data=request)
        call_id = os.urandom(16)
        try:
            answer = await self._request(p2pd_pb2.PersistentConnectionRequest(callId=call_id, callUnary=call))
        except asyncio.CancelledError:
            cancel = p2pd_pb2.PersistentConnectionRequest(callId=call_id, cancel=p2pd_pb2.Cancel())
            self._send(cancel)
            asyncio.get_running_loop().call_later(CANCEL_AGAIN_S, self._send, cancel)
            raise
        result: Any = answer.callUnaryResponse
        if result.HasField("error"):
            raise RemoteCallError(result.error.decode(errors="replace"))
        response: bytes = result.response
        return response

    async def serve(self, protocol: str, answer: UnaryAnswer) -> None:
        self._answers[protocol] = answer
        add = p2pd_pb2.AddUnaryHandlerRequest(proto=protocol, balanced=False)
        await self._request(p2pd_pb2.PersistentConnectionRequest(callId=os.urandom(16), addUnaryHandler=add))

    async def ping(self) -> None:
        """Wait for an answer of the daemon itself, which refuses a call to nobody, or for its end."""
        call = p2pd_pb2.CallUnaryRequest(peer=b"", proto="", data=b"")
        with contextlib.suppress(ControlError, UnaryConnectionClosed):
            await self._request(p2pd_pb2.PersistentConnectionRequest(callId=os.urandom(16), callUnary=call))

    def num_calls(self, peer_id: str) -> int:
        """Return the number of calls of a peer that are handled here now."""
        return self._slots.held_by(peer_id_bytes(peer_id))

    async def run(self) -> None:
        """Read until the connection ends. On return every pending call has failed, and every handler has ended."""
        try:
            async with asyncio.TaskGroup() as handlers:
                try:
                    while True:
                        self._receive(await read_message(self._reader, p2pd_pb2.PersistentConnectionResponse), handlers)
                except (asyncio.IncompleteReadError, ConnectionError, ControlError):
                    self.close()
        finally:
            self.close()

    def close(self) -> None:
        """End the connection, `run`, and all handlers and pending calls."""
        self._closed = True
        self._writer.transport.abort()
        for handler in self._handlers.values():
            handler.cancel()
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(UnaryConnectionClosed("the libp2p daemon has ended"))

    def _send(self, message: Any) -> None:
        if not self._closed:
            write_message(self._writer, message)

    async def _request(self, message: Any) -> Any:
        if self._closed:
            raise UnaryConnectionClosed("the libp2p daemon has ended")
        pending = asyncio.get_running_loop().create_future()
        self._pending[message.callId] = pending
        try:
            write_message(self._writer, message)
            await self._writer.drain()
            return await pending
        except ConnectionError:
            raise UnaryConnectionClosed("the libp2p daemon has ended") from None
        finally:
            del self._pending[message.callId]
            if pending.done() and not pending.cancelled():
                pending.exception()  # marks it as retrieved, even if the wait was cancelled at the same moment

    def _receive(self, message: Any, handlers: asyncio.TaskGroup) -> None:
        call_id: bytes = message.callId
        kind = message.WhichOneof("message")
        if kind == "requestHandling":
            self._start_handler(call_id, message.requestHandling, handlers)
        elif kind == "cancel":
            if call_id in self._handlers:
                self._handlers[call_id].cancel()
        else:
            pending = self._pending.get(call_id)
            if pending is None or pending.done():
                return  # its caller has left
            if kind == "daemonError":
                pending.set_exception(ControlError(message.daemonError.message))
            else:
                pending.set_result(message)

    def _start_handler(self, call_id: bytes, request: Any, handlers: asyncio.TaskGroup) -> None:
        answer = self._answers.get(request.proto)
        peer: bytes = request.peer
        # a stranger can give two calls one id
        if answer is None or call_id in self._handlers or not self._slots.has_room(peer):
            refusal = p2pd_pb2.CallUnaryResponse(error=(NOT_SERVED if answer is None else BUSY).encode())
            self._send(p2pd_pb2.PersistentConnectionRequest(callId=call_id, unaryResponse=refusal))
            return
        self._slots.take(peer)

        def ended(_task: asyncio.Task[None]) -> None:
            del self._handlers[call_id]
            self._slots.give_back(peer)

        self._handlers[call_id] = handlers.create_task(self._handle(call_id, answer, request))
        self._handlers[call_id].add_done_callback(ended)

    async def _handle(self, call_id: bytes, answer: UnaryAnswer, request: Any) -> None:
        try:
            if self._slots.held_by(request.peer) > 1:
                async with self._turns.setdefault(request.peer, asyncio.Lock()):
                    await asyncio.sleep(0)
            response = p2pd_pb2.CallUnaryResponse(response=await answer(peer_id_text(request.peer), request.data))
        except NotServed:  # `answer` does not serve this peer
            response = p2pd_pb2.CallUnaryResponse(error=NOT_SERVED.encode())
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            # something else was cancelled for which `answer` waited, and the caller still waits
            response = p2pd_pb2.CallUnaryResponse(error=FAILED.encode())
        except Exception:  # a bug, which must fail only this call
            logger.exception("an answer to %s failed", request.proto)
            response = p2pd_pb2.CallUnaryResponse(error=FAILED.encode())
        self._send(p2pd_pb2.PersistentConnectionRequest(callId=call_id, unaryResponse=response))
        with contextlib.suppress(ConnectionError):  # `run` notices it, too
            await self._writer.drain()
