"""Calls of any size: small ones over the unary connection, large ones over a stream, invisible to the caller.

A request that is too large goes as a stream's one message. A response that turns out too large stays here as a
*parcel*, and its caller fetches it over a stream: the handler must not run twice. `Calls` owns the parcels; tasks
belong to the unary connection and to the stream server.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, TypeVar

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation, SwarmError
from swarm_protocol.failure_messages import decode_failure, encode_failure

from swarm.network.interface import EndOfStream, Stream, StreamHandler, UnaryHandler, too_long, took_too_long
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.unary_connection import UnaryAnswer
from swarm.network.peer_budgets import MAX_UNARY_BYTES, UnreadBudget

MAX_PARCELS_BYTES = 256 * 2**20
"""Responses that wait to be fetched; the oldest of the peer that has most make room. Two of the largest, and many of
the usual."""

MAX_PARCELS_PER_PEER_BYTES = 128 * 2**20
"""The same of one caller: two of the largest, or far more chunks of a state than it asks for at once."""

PARCEL_S = 60.0
"""A caller fetches its parcel at once, or has left."""

MAX_BULK_PER_PEER = 4
"""Large requests of a peer that are received and answered at once, and as many parcels that it fetches meanwhile, since
a handler may answer late; others' streams wait, each with a window unread. A peer that takes no responses thus has few
made, and kept until they are given up."""

MAX_LEAVING_BYTES = 512 * 2**20
"""Responses to all peers that leave over streams. Beyond it the largest of the peer that has most is given up, so that
many peers that read nothing do not keep out one that asks for little."""

BULK_S = 300.0
"""Time for a large request to come, or a large response to leave: the largest message over a slow uplink, of 250 kB/s.
"""

_OK, _FAILURE, _PARCEL = b"\x00", b"\x01", b"\x02"
TOKEN_BYTES = 16

_LATE_REQUEST, _LATE_RESPONSE = "the request did not come in time", "the response was not taken in time"

OpenStream = Callable[[str, str, int], AbstractAsyncContextManager[Stream]]
"""`open(peer_id, protocol, max_bytes)`: no message that comes is longer."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Leaving:
    """A response that is being sent, until `limit`. It implements `peer_budgets.UnreadHolder`."""

    def __init__(self, peer_id: str, limit: asyncio.Timeout) -> None:
        self.peer_id = peer_id
        self._limit = limit

    def give_way(self, _refusal: PeerRefused) -> None:
        if not self._limit.expired():
            self._limit.reschedule(0.0)


class Calls:
    """Sends requests to peers and answers theirs, whatever their size."""

    def __init__(self, host: Host, open_stream: OpenStream) -> None:
        self._host = host
        self._open_stream = open_stream
        self._parcels: OrderedDict[bytes, tuple[str, bytes]] = OrderedDict()
        self._num_parcel_bytes: Counter[str] = Counter()  # of each peer that has any
        # of a peer only while it sends or fetches
        self._turns: dict[tuple[str, str], asyncio.Semaphore] = {}
        self._num_in_turn: Counter[tuple[str, str]] = Counter()
        # the turns of a peer bound what leaves to it
        self._leaving = UnreadBudget(max_peer_bytes=MAX_LEAVING_BYTES, max_host_bytes=MAX_LEAVING_BYTES)

    async def call(self, peer_id: str, names: tuple[str, str, str], request: bytes, max_bytes: int) -> bytes:
        """Call a method. `names` are the protocols of small requests, large requests and parcels. The caller sets
        deadlines."""
        unary_name, bulk_name, parcel_name = names
        if len(request) > MAX_UNARY_BYTES:
            return await self.exchange(peer_id, bulk_name, request, max_bytes)
        response = await self._host.call(peer_id, unary_name, request)
        status, body = response[:1], response[1:]
        if status == _OK:
            if len(body) > max_bytes:  # no more than the daemon's own limit
                raise too_long(max_bytes, peer_id)
            return body
        if status == _FAILURE:
            raise decode_failure(body, peer_id)
        if status == _PARCEL and len(body) == TOKEN_BYTES:
            return await self.exchange(peer_id, parcel_name, body, max_bytes)
        raise PeerViolation("the peer's response has no known form", peer_id=peer_id)

    async def exchange(self, peer_id: str, name: str, request: bytes, max_bytes: int) -> bytes:
        """Send a request over a stream of the protocol `name` and return its response."""
        async with self._open_stream(peer_id, name, max_bytes) as stream:
            await stream.send(request)
            try:
                return await stream.receive()
            except EndOfStream:
                raise PeerViolation("the peer ended without a response", peer_id=peer_id) from None

    def unary_answer(self, handler: UnaryHandler) -> UnaryAnswer:
        async def answer(peer_id: str, request: bytes) -> bytes:
            try:
                response = await handler(peer_id, request)
            except SwarmError as error:
                return _FAILURE + encode_failure(error)
            except TimeoutError:
                logger.debug("a call of %s took longer than its handler's deadline", peer_id)
                return _FAILURE + encode_failure(took_too_long(peer_id))
            except Exception as error:
                logger.exception("a handler failed")
                return _FAILURE + encode_failure(error)
            if len(response) > MAX_UNARY_BYTES:
                return _PARCEL + self._keep(peer_id, response)
            return _OK + response

        return answer

    def bulk_handler(self, handler: UnaryHandler) -> StreamHandler:
        async def handle(peer_id: str, stream: Stream) -> None:
            async with self._in_turn(peer_id, "bulk"):
                request = await _in_time(peer_id, stream.receive(), BULK_S, _LATE_REQUEST)
                await self._send(peer_id, stream, await handler(peer_id, request))

        return handle

    @asynccontextmanager
    async def _in_turn(self, peer_id: str, kind: Literal["bulk", "parcel"]) -> AsyncIterator[None]:
        """Wait for one of a peer's turns for streams of this kind, and hold it. Raises PeerTimeout."""
        key = (peer_id, kind)
        turn = self._turns.setdefault(key, asyncio.Semaphore(MAX_BULK_PER_PEER))
        self._num_in_turn[key] += 1
        try:
            await _in_time(peer_id, turn.acquire(), BULK_S, _LATE_REQUEST)
            try:
                yield
            finally:
                turn.release()
        finally:
            self._num_in_turn[key] -= 1
            if not self._num_in_turn[key]:
                del self._num_in_turn[key], self._turns[key]

    async def hand_out_parcel(self, peer_id: str, stream: Stream) -> None:
        token = await _in_time(peer_id, stream.receive(), PARCEL_S, _LATE_REQUEST)
        async with self._in_turn(peer_id, "parcel"):
            recipient, response = self._parcels.get(token, ("", b""))
            if recipient != peer_id:
                raise PeerRefused("the response is not kept any more", remedy="ask again, and fetch it at once")
            self._drop(token)
            await self._send(peer_id, stream, response)

    async def _send(self, peer_id: str, stream: Stream, response: bytes) -> None:
        """Send a response. Raises PeerTimeout, also where it has to give way to others."""
        try:
            async with asyncio.timeout(BULK_S) as limit:
                leaving = _Leaving(peer_id, limit)
                self._leaving.charge(leaving, len(response))
                try:
                    await stream.send(response)
                finally:
                    self._leaving.drop(leaving)
        except TimeoutError:
            raise PeerTimeout(_LATE_RESPONSE, peer_id=peer_id) from None

    def _keep(self, peer_id: str, response: bytes) -> bytes:
        token = os.urandom(TOKEN_BYTES)
        self._parcels[token] = (peer_id, response)
        self._num_parcel_bytes[peer_id] += len(response)
        asyncio.get_running_loop().call_later(PARCEL_S, self._drop, token)
        while self._num_parcel_bytes[peer_id] > MAX_PARCELS_PER_PEER_BYTES:
            self._drop_oldest_of(peer_id)
        while self._num_parcel_bytes.total() > MAX_PARCELS_BYTES:
            self._drop_oldest_of(self._num_parcel_bytes.most_common(1)[0][0])
        return token

    def _drop_oldest_of(self, peer_id: str) -> None:
        self._drop(next(each for each, (recipient, _) in self._parcels.items() if recipient == peer_id))

    def _drop(self, token: bytes) -> None:
        """Drop a parcel; a second time does nothing."""
        recipient, response = self._parcels.pop(token, ("", b""))
        self._num_parcel_bytes[recipient] -= len(response)
        if not self._num_parcel_bytes[recipient]:
            del self._num_parcel_bytes[recipient]


async def _in_time(peer_id: str, waiting: Coroutine[Any, Any, T], within_s: float, late: str) -> T:
    """Return what `waiting` does. Raises PeerTimeout: nothing is kept for as long as a peer likes."""
    try:
        async with asyncio.timeout(within_s):
            return await waiting
    except TimeoutError:
        raise PeerTimeout(late, peer_id=peer_id) from None
