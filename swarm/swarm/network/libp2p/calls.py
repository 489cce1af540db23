"""Calls of any size: small ones go over the unary connection, large ones over a stream. Callers see no difference.

A request that is too large for the unary connection is the one message of a stream. If only the response is too large,
the answering node keeps it as a *parcel*, which the caller fetches over a stream: the handler must not run twice.
`Calls` owns the parcels; tasks belong to the unary connection and to the stream server.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, TypeVar

from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation
from swarm_protocol.failure_messages import decode_failure, encode_failure

from swarm.held_counts import HeldCounts
from swarm.network.interface import EndOfStream, Stream, StreamHandler, UnaryHandler, failure_for_caller, too_long
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.unary_connection import UnaryAnswer
from swarm.network.peer_budgets import MAX_UNARY_BYTES, UnreadBudget, greediest

MAX_PARCELS_BYTES = 256 * 2**20
"""Maximum bytes of all parcels: several of the largest, or many usual ones. Beyond it, the oldest parcels of the
`greediest` peer are dropped."""

MAX_PARCELS_PER_PEER_BYTES = 128 * 2**20
"""Maximum bytes of one caller's parcels: nearly two of the largest, or far more chunks of a state than it asks for at
once."""

PARCEL_S = 60.0
"""Time for which a parcel is kept. A caller fetches it at once, unless it has left."""

MAX_BULK_PER_PEER = 4
"""Maximum large requests of a peer that are received and answered at once. As many parcels may be fetched meanwhile,
since a handler may answer late. Further streams of the peer wait, each with at most a window unread. So for a peer that
takes no responses, few responses are made and kept."""

MAX_LEAVING_BYTES = 512 * 2**20
"""Maximum bytes of responses that are being sent over streams to all peers. Beyond it, the largest response to the
`greediest` peer is given up, so that many peers that read nothing do not keep out a peer that asks for little."""

BULK_S = 300.0
"""Time for a large request to come in, or for a large response to be sent: enough for the largest message over a slow
uplink of 250 kB/s."""

_OK, _FAILURE, _PARCEL = b"\x00", b"\x01", b"\x02"
TOKEN_BYTES = 16


OpenStream = Callable[[str, str, int], AbstractAsyncContextManager[Stream]]
"""`open(peer_id, protocol, max_bytes)` opens a stream that accepts messages of up to `max_bytes`."""

T = TypeVar("T")


class _Leaving:
    """A response that is being sent, whose time-out is `limit`. It implements `peer_budgets.UnreadHolder`."""

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
        self._num_parcel_bytes = HeldCounts[str]()  # by peer with parcels
        # both only have peers that send or fetch now
        self._turns: dict[tuple[str, str], asyncio.Semaphore] = {}
        self._num_in_turn = HeldCounts[tuple[str, str]]()
        # the turns already bound what is sent to one peer
        self._leaving = UnreadBudget(
            host.provider_of, max_peer_bytes=MAX_LEAVING_BYTES, max_host_bytes=MAX_LEAVING_BYTES
        )

    async def call(self, peer_id: str, names: tuple[str, str, str], request: bytes, max_bytes: int) -> bytes:
        """Call a method. `names` are the protocols of small requests, large requests and parcels. There is no time-out
        here; the caller sets one."""
        unary_name, bulk_name, parcel_name = names
        if len(request) > MAX_UNARY_BYTES:
            return await self.exchange(peer_id, bulk_name, request, max_bytes)
        response = await self._host.call(peer_id, unary_name, request)
        status, body = response[:1], response[1:]
        if status == _OK:
            if len(body) > max_bytes:  # the daemon's own limit has bounded it already
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
            except Exception as error:
                return _FAILURE + encode_failure(failure_for_caller(error, peer_id))
            if len(response) > MAX_UNARY_BYTES:
                return _PARCEL + self._keep(peer_id, response)
            return _OK + response

        return answer

    def bulk_handler(self, handler: UnaryHandler) -> StreamHandler:
        async def handle(peer_id: str, stream: Stream) -> None:
            async with self._in_turn(peer_id, "bulk"):
                request = await _in_time(peer_id, stream.receive(), BULK_S)
                await self._send(peer_id, stream, await handler(peer_id, request))

        return handle

    @asynccontextmanager
    async def _in_turn(self, peer_id: str, kind: Literal["bulk", "parcel"]) -> AsyncIterator[None]:
        """Wait for a turn of the peer for a stream of this kind, and hold it while the context lasts. Raises
        PeerTimeout."""
        key = (peer_id, kind)
        turn = self._turns.setdefault(key, asyncio.Semaphore(MAX_BULK_PER_PEER))
        try:
            with self._num_in_turn.holding(key):
                await _in_time(peer_id, turn.acquire(), BULK_S)
                try:
                    yield
                finally:
                    turn.release()
        finally:
            if key not in self._num_in_turn:
                del self._turns[key]

    async def hand_out_parcel(self, peer_id: str, stream: Stream) -> None:
        token = await _in_time(peer_id, stream.receive(), PARCEL_S)
        async with self._in_turn(peer_id, "parcel"):
            recipient, response = self._parcels.get(token, ("", b""))
            if recipient != peer_id:
                raise PeerRefused("the response is not kept any more", remedy="ask again, and fetch it at once")
            self._drop(token)
            await self._send(peer_id, stream, response)

    async def _send(self, peer_id: str, stream: Stream, response: bytes) -> None:
        """Send a response. Raises PeerTimeout, also if the response has to give way to others."""
        try:
            async with asyncio.timeout(BULK_S) as limit:
                leaving = _Leaving(peer_id, limit)
                self._leaving.charge(leaving, len(response))
                try:
                    await stream.send(response)
                finally:
                    self._leaving.drop(leaving)
        except TimeoutError:
            raise PeerTimeout("the response was not taken in time", peer_id=peer_id) from None

    def _keep(self, peer_id: str, response: bytes) -> bytes:
        token = os.urandom(TOKEN_BYTES)
        self._parcels[token] = (peer_id, response)
        self._num_parcel_bytes[peer_id] += len(response)
        asyncio.get_running_loop().call_later(PARCEL_S, self._drop, token)
        while self._num_parcel_bytes[peer_id] > MAX_PARCELS_PER_PEER_BYTES:
            self._drop_oldest_of(peer_id)
        while self._num_parcel_bytes.total() > MAX_PARCELS_BYTES:
            self._drop_oldest_of(greediest(self._num_parcel_bytes, self._host.provider_of))
        return token

    def _drop_oldest_of(self, peer_id: str) -> None:
        self._drop(next(each for each, (recipient, _) in self._parcels.items() if recipient == peer_id))

    def _drop(self, token: bytes) -> None:
        """Drop a parcel. Idempotent."""
        recipient, response = self._parcels.pop(token, ("", b""))
        self._num_parcel_bytes[recipient] -= len(response)


async def _in_time(peer_id: str, waiting: Coroutine[Any, Any, T], within_s: float) -> T:
    """Return the result of `waiting`. Raises PeerTimeout after `within_s`, so that no peer can hold resources without
    limit."""
    try:
        async with asyncio.timeout(within_s):
            return await waiting
    except TimeoutError:
        raise PeerTimeout("the request did not come in time", peer_id=peer_id) from None
