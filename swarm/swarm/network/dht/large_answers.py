"""Answers of the record DHT that are too large for the unary connection, whose answers the libp2p daemon keeps.

Such an answer leaves out places or records, and says so; the asker then asks the same over a stream, where it gets
the whole answer. Streams belong to whoever provides them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Protocol

from swarm_protocol import limits
from swarm_protocol.dht_messages import FindResponse
from swarm_protocol.errors import SwarmError

from swarm.network.dht.known_peers import RPC_TIMEOUT_S
from swarm.network.interface import NotServed, UnaryHandler
from swarm.network.peer_budgets import MAX_UNARY_BYTES

logger = logging.getLogger(__name__)


class StreamedCalls(Protocol):
    """The part of `PeerMethods` that is used here."""

    async def serve_streamed(self, protocol: str, answer: UnaryHandler, *, max_request_bytes: int) -> None: ...

    async def call_streamed(
        self, peer_id: str, protocol: str, request: bytes, *, timeout_s: float, max_bytes: int
    ) -> bytes:
        """Raises SwarmError, NotServed, or TimeoutError after `timeout_s`."""


class LargeAnswers:
    """Cuts answers, and fetches the whole ones that others have cut. Without `streams` it does neither."""

    def __init__(self, streams: StreamedCalls | None, prefix: str, chance: random.Random) -> None:
        self._streams = streams
        self._protocol = f"{prefix}find_whole"
        self._chance = chance

    async def serve(self, answer: UnaryHandler) -> None:
        """Have `answer` return the whole answers."""
        if self._streams is not None:
            await self._streams.serve_streamed(self._protocol, answer, max_request_bytes=limits.MAX_FIND_REQUEST_BYTES)

    def cut(self, answer: FindResponse) -> FindResponse:
        """Return the answer, or what of it goes over the unary connection."""
        return answer if self._streams is None else answer.within(MAX_UNARY_BYTES, self._chance)

    async def fetch(self, peer_id: str, request: bytes, decode: Callable[[bytes], FindResponse]) -> FindResponse | None:
        """Return the whole answer of a peer that has cut it. None: it does not come, so what came before counts."""
        if self._streams is None:
            return None
        try:
            data = await self._streams.call_streamed(
                peer_id,
                self._protocol,
                request,
                timeout_s=RPC_TIMEOUT_S,
                max_bytes=limits.MAX_FIND_RESPONSE_BYTES,
            )
            return decode(data)
        except (SwarmError, NotServed, TimeoutError) as error:
            logger.debug("%s gave no whole answer: %s", peer_id, error)
            return None
