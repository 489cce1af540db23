"""Calls and streams by method: those that this node makes to peers, and those that it serves.

Maps each method to the protocol ids by which peers know it. `calls` carries requests of any size, `stream_resume` makes
the streams that this node opens, and `stream_server` accepts those of peers. Tasks run in a task group of the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout

from swarm.network.interface import NotServed, ServedMethods, Stream, StreamHandler, UnaryHandler
from swarm.network.libp2p.calls import TOKEN_BYTES, Calls
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.path_watch import PathWatch
from swarm.network.libp2p.stream_resume import ResumableStreams
from swarm.network.libp2p.stream_server import StreamServer
from swarm.network.network_entry import explain_refusal, method_prefix


class PeerMethods:
    """Calls peers and answers them. `start` it once, before anything is served."""

    def __init__(self, host: Host, tasks: asyncio.TaskGroup, watch: PathWatch, network_id: str) -> None:
        self._host = host
        self._network_id = network_id
        self._prefix = method_prefix(network_id)
        self.resumable = ResumableStreams(host, watch, self._name("resume", ""))
        self._server = StreamServer(host, tasks, self.resumable)
        self._calls = Calls(host, self.resumable.open)
        self._calls_served = ServedMethods[UnaryHandler]()
        self._streams_served = ServedMethods[StreamHandler]()

    async def start(self) -> None:
        await self._server.start()
        await self._server.serve(self._name("parcel", ""), self._calls.hand_out_parcel, max_message_bytes=TOKEN_BYTES)

    def close(self) -> None:
        self._server.close()

    async def call(self, peer_id: str, method: str, request: bytes, *, timeout_s: float, max_bytes: int) -> bytes:
        """Do as `Network.call`."""
        if len(request) > limits.MAX_MESSAGE_BYTES:
            raise ValueError(f"request of {len(request)} bytes, more than {limits.MAX_MESSAGE_BYTES}")
        names = (self._name("call", method), self._name("bulk", method), self._name("parcel", ""))
        async with self._asking(peer_id, method, timeout_s, f"no answer to {method!r}"):
            return await self._calls.call(peer_id, names, request, max_bytes)

    @contextlib.asynccontextmanager
    async def stream(self, peer_id: str, method: str, *, timeout_s: float) -> AsyncIterator[Stream]:
        """Do as `Network.stream`."""
        async with self._asking(peer_id, method, timeout_s, f"{method!r} was not opened"):
            raw = await self._host.open_stream(peer_id, self._name("stream", method))
        async with self.resumable.opened(raw, peer_id, timeout_s=timeout_s) as stream:
            yield stream

    @contextlib.asynccontextmanager
    async def _asking(self, peer_id: str, method: str, timeout_s: float, late: str) -> AsyncIterator[None]:
        """Bound the time of the body, and replace NotServed by its reason. `late` is the beginning of the PeerTimeout's
        message."""
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    yield
                except NotServed:
                    raise await explain_refusal(self._host, peer_id, self._network_id, method) from None
        except TimeoutError:
            raise PeerTimeout(f"{late} within {timeout_s:g} s", peer_id=peer_id) from None

    async def serve_streamed(self, protocol: str, answer: UnaryHandler, *, max_request_bytes: int) -> None:
        """Answer requests of `protocol` over streams, at most `calls.MAX_BULK_PER_PEER` of a peer at once."""
        handler = self._calls.bulk_handler(answer)
        await self._server.serve(protocol, handler, max_message_bytes=max_request_bytes)

    async def call_streamed(
        self, peer_id: str, protocol: str, request: bytes, *, timeout_s: float, max_bytes: int
    ) -> bytes:
        """Send a request of `protocol` to a peer over a stream. Raises SwarmError, NotServed, or TimeoutError after
        `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            return await self._calls.exchange(peer_id, protocol, request, max_bytes)

    async def serve(self, method: str, handler: UnaryHandler) -> None:
        """Do as `Network.serve`."""

        async def answer(peer_id: str, request: bytes) -> bytes:
            return await self._calls_served[method](peer_id, request)

        with self._calls_served.adding(method, handler) as is_new:
            if is_new:
                await self._server.serve(self._name("bulk", method), self._calls.bulk_handler(answer))
                await self._host.serve(self._name("call", method), self._calls.unary_answer(answer))

    async def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Do as `Network.serve_stream`."""

        async def answer(peer_id: str, stream: Stream) -> None:
            await self._streams_served[method](peer_id, stream)

        with self._streams_served.adding(method, handler) as is_new:
            if is_new:
                await self._server.serve(self._name("stream", method), answer)

    def release(self, *methods: str) -> None:
        """Do as `Network.release`."""
        self._calls_served.release(*methods)
        self._streams_served.release(*methods)

    def _name(self, kind: str, method: str) -> str:
        return f"{self._prefix}{kind}/{method}"
