"""Keeps the peers that this node's part of the DHT knows, and calls them.

Answers over the unary connection have to be small, since the libp2p daemon keeps them (`peer_budgets`). A larger answer
is cut, and says so. The caller then asks the same over a stream, which carries the whole answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from swarm_protocol import limits
from swarm_protocol.dht_messages import FindResponse
from swarm_protocol.errors import PeerError, PeerRefused, PeerViolation, SwarmError
from swarm_protocol.identity import check_peer_id

from swarm.network.dht.routing_table import AddressBook, RoutingTable, Suspects
from swarm.network.interface import NotServed, UnaryHandler

NUM_PARALLEL_CALLS = 64
"""Maximum calls under way. It is several times what one search has (`searches.NUM_PARALLEL`), since silent peers hold
their places for RPC_TIMEOUT_S."""

SMALL_BYTES = 4096
"""Only answers of at most this size measure round trips: the time of a longer answer depends on the bandwidth."""

RPC_TIMEOUT_S = 3.0

WHOLE = "find_whole"
"""The method that answers like `find` over a stream, without cutting."""

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
        """Call a peer, dialled at `addrs` if need be. Raises PeerError, NotServed, or TimeoutError after
        `timeout_s`."""

    async def serve(self, protocol: str, answer: UnaryHandler) -> None: ...


class StreamedCalls(Protocol):
    """The part of `PeerMethods` that the DHT uses."""

    async def serve_streamed(self, protocol: str, answer: UnaryHandler, *, max_request_bytes: int) -> None: ...

    async def call_streamed(
        self, peer_id: str, protocol: str, request: bytes, *, timeout_s: float, max_bytes: int
    ) -> bytes:
        """Raises SwarmError, NotServed, or TimeoutError after `timeout_s`."""


class KnownPeers:
    """The routing `table`, the address `book` of its members, and the `suspects`, which did not answer lately.

    `on_answer(peer_id, seconds)` is called for each small answer, since peers answer these calls at once. Without
    `streams` no answer is cut.
    """

    def __init__(self, host: RecordTransport, prefix: str, streams: StreamedCalls | None = None) -> None:
        self._host = host
        self._streams = streams
        self._prefix = prefix
        self.table = RoutingTable(host.peer_id)
        self.book = AddressBook()
        self.suspects = Suspects()
        self.own_addrs: tuple[str, ...] = ()
        """This node's own addresses, which its network keeps up to date. While there are none, others do not add this
        node to their tables."""
        self._calls = asyncio.Semaphore(NUM_PARALLEL_CALLS)
        self.on_answer: Callable[[str, float], None] = lambda _peer_id, _seconds: None

    async def call(
        self, peer_id: str, method: str, request: bytes, decode: Callable[[bytes], T], hints: Sequence[str] = ()
    ) -> T | None:
        """Call a peer. Return None if there is no answer or a malformed one; the peer is then removed from the table
        and suspected, unless it is only busy. `hints` are addresses of the peer that others gave."""
        addrs, now = self.book.of(peer_id), asyncio.get_running_loop().time
        if hints and hints != addrs:
            addrs = tuple(dict.fromkeys((*addrs, *hints)))
        await self._calls.acquire()  # as `async with` does, in half the time
        try:
            asked_s = now()
            data = await self._host.call(peer_id, self._prefix + method, request, addrs=addrs, timeout_s=RPC_TIMEOUT_S)
            answered_s = now()
            answer = decode(data)
        except PeerRefused as error:
            logger.debug("%s is too busy for %s: %s", peer_id, method, error)
            return None
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
        """Send an encoded request for `num_keys` keys. The answer may cover only the first ones. Return None if there
        is no answer. `hints` are addresses of the peer that others gave."""
        response = await self.call(peer_id, "find", request, partial(_decoded, peer_id, num_keys), hints)
        if response is not None and peer_id in self.table:  # only members, so that newcomers cannot displace addresses
            self.book.learn(peer_id, response.addrs)
        return response

    async def find_whole(self, peer_id: str, num_keys: int, request: bytes) -> FindResponse | None:
        """Return the whole answer of a peer whose answer was cut, or None if it does not come."""
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
        """Note a caller that gave addresses at which it can be dialled. Raises PeerViolation if its peer id is not of
        the kind that nodes have."""
        try:
            is_member = self.table.heard_of(check_peer_id(peer_id), now_s := asyncio.get_running_loop().time())
        except ValueError as error:
            raise PeerViolation(str(error)) from None
        self.suspects.has_called(peer_id, now_s)
        if is_member:
            self.book.learn(peer_id, addrs)


def _decoded(peer_id: str, num_keys: int, answer: bytes) -> FindResponse:
    """Decode an answer to a request for `num_keys` keys. Raises PeerViolation."""
    response = FindResponse.from_bytes(answer)
    if not min(1, num_keys) <= len(response.found) <= num_keys:
        raise PeerViolation(f"{len(response.found)} answers to {num_keys} keys", peer_id=peer_id)
    return response
