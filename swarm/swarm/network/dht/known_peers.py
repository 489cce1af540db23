"""The peers that this node's part of the DHT knows, and calls to them, which show whether a peer is there.

An answer that is too large for the unary connection, whose answers the libp2p daemon keeps, leaves out places or
records, and says so; the same is then asked over a stream, where the whole answer comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from swarm_protocol import limits
from swarm_protocol.dht_messages import FindResponse
from swarm_protocol.errors import PeerError, PeerViolation, SwarmError
from swarm_protocol.identity import check_peer_id

from swarm.network.dht.routing_table import AddressBook, RoutingTable, Suspects
from swarm.network.interface import NotServed, UnaryHandler

NUM_PARALLEL_CALLS = 16

SMALL_BYTES = 4096
"""The time of a longer answer says more of the bandwidth than of the way."""

RPC_TIMEOUT_S = 3.0

WHOLE = "find_whole"
"""The method over streams, beside `find`."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RecordTransport(Protocol):
    """The part of a host that the DHT uses: `libp2p.host.Host`, or a simulated one."""

    @property
    def peer_id(self) -> str: ...

    async def call(
        self,
        peer_id: str,
        protocol: str,
        request: bytes,
        *,
        addrs: Sequence[str] | None = None,
        timeout_s: float,
    ) -> bytes:
        """Ask a peer, which may have to be dialled at `addrs`. Raises PeerError, NotServed, or TimeoutError after
        `timeout_s`."""

    async def serve(self, protocol: str, answer: UnaryHandler) -> None: ...


class StreamedCalls(Protocol):
    """The part of `PeerMethods` that is used here."""

    async def serve_streamed(self, protocol: str, answer: UnaryHandler, *, max_request_bytes: int) -> None: ...

    async def call_streamed(
        self, peer_id: str, protocol: str, request: bytes, *, timeout_s: float, max_bytes: int
    ) -> bytes:
        """Raises SwarmError, NotServed, or TimeoutError after `timeout_s`."""


class KnownPeers:
    """The routing `table`, the addresses of its members in `book`, and the `suspects`, which did not answer lately.

    `on_answer` is told of each small answer to a call, and after how many seconds it came: peers answer these calls at
    once. Without `streams`, small answers are as large as others.
    """

    def __init__(self, host: RecordTransport, prefix: str, streams: StreamedCalls | None = None) -> None:
        self._host = host
        self._streams = streams
        self._prefix = prefix
        self.table = RoutingTable(host.peer_id)
        self.book = AddressBook()
        self.suspects = Suspects()
        self.own_addrs: tuple[str, ...] = ()
        """This node's own addresses, kept up to date by its network. While it has none, it only asks others."""
        self._calls = asyncio.Semaphore(NUM_PARALLEL_CALLS)
        self.on_answer: Callable[[str, float], None] = lambda _peer_id, _seconds: None

    async def call(
        self, peer_id: str, method: str, request: bytes, decode: Callable[[bytes], T], hints: Sequence[str] = ()
    ) -> T | None:
        """Call a peer. Return None if there is no answer, or one that is none. The peer is then out of the table, and
        suspected. `hints` are addresses of the peer that others named."""
        addrs, now = self.book.of(peer_id), asyncio.get_running_loop().time
        if hints and hints != addrs:
            addrs = tuple(dict.fromkeys((*addrs, *hints)))
        await self._calls.acquire()  # as `async with` does, in half the time
        try:
            asked_s = now()
            data = await self._host.call(peer_id, self._prefix + method, request, addrs=addrs, timeout_s=RPC_TIMEOUT_S)
            answered_s = now()
            answer = decode(data)
        except (PeerError, NotServed, TimeoutError) as error:
            logger.debug("%s did not answer %s: %s", peer_id, method, error)
            self.table.lost(peer_id)
            self.suspects.add(peer_id, now())
            return None
        finally:
            self._calls.release()
        self.table.heard_of(peer_id, answered_s)
        self.suspects.clear(peer_id)
        if len(data) <= SMALL_BYTES:
            self.on_answer(peer_id, answered_s - asked_s)
        return answer

    async def find(self, peer_id: str, num_keys: int, request: bytes, hints: Sequence[str] = ()) -> FindResponse | None:
        """Ask for the first of the `num_keys` keys of the encoded `request`. None means no answer. `hints` are
        addresses of the peer that others named."""
        response = await self.call(peer_id, "find", request, partial(_decoded, peer_id, num_keys), hints)
        if response is not None and peer_id in self.table:  # so that a flood of newcomers pushes out no address
            self.book.learn(peer_id, response.addrs)
        return response

    async def find_whole(self, peer_id: str, num_keys: int, request: bytes) -> FindResponse | None:
        """Return the whole answer of a peer that has cut it. None: it does not come, so what came before counts."""
        if self._streams is None:
            return None
        try:
            data = await self._streams.call_streamed(
                peer_id,
                f"{self._prefix}{WHOLE}",
                request,
                timeout_s=RPC_TIMEOUT_S,
                max_bytes=limits.MAX_FIND_RESPONSE_BYTES,
            )
            return _decoded(peer_id, num_keys, data)
        except (SwarmError, NotServed, TimeoutError) as error:
            logger.debug("%s gave no whole answer: %s", peer_id, error)
            return None

    def meet(self, peer_id: str, addrs: Sequence[str]) -> None:
        """Note a caller that says where it can be dialled. Raises PeerViolation for a key of a kind that no node
        has."""
        try:
            is_member = self.table.heard_of(check_peer_id(peer_id), now_s := asyncio.get_running_loop().time())
        except ValueError as error:
            raise PeerViolation(str(error)) from None
        self.suspects.has_called(peer_id, now_s)
        if is_member:
            self.book.learn(peer_id, addrs)


def _decoded(peer_id: str, num_keys: int, answer: bytes) -> FindResponse:
    """Raises PeerViolation."""
    response = FindResponse.from_bytes(answer)
    if not min(1, num_keys) <= len(response.found) <= num_keys:
        raise PeerViolation(f"{len(response.found)} answers to {num_keys} keys", peer_id=peer_id)
    return response
