"""The streams that this node opens: the counterpart of `stream_server`.

What a stream does belongs to `libp2p_stream`, how it goes on over another connection to `stream_resume`. The task that
opens a stream owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm_protocol import limits

from swarm.network.interface import Stream
from swarm.network.libp2p.host import Host, RawStream
from swarm.network.libp2p.stream_resume import ResumableStreams


class OpenedStreams:
    """Opens streams to peers, and runs them until their contexts are left."""

    def __init__(self, host: Host, resumable: ResumableStreams) -> None:
        self._host = host
        self._resumable = resumable

    @asynccontextmanager
    async def open(self, peer_id: str, protocol: str, max_bytes: int) -> AsyncIterator[Stream]:
        """Open a stream without a deadline of its own, for a call, which has one deadline for everything."""
        raw = await self._host.open_stream(peer_id, protocol)
        async with self.run(raw, peer_id, timeout_s=None, max_message_bytes=max_bytes) as stream:
            yield stream

    @asynccontextmanager
    async def run(
        self,
        raw: RawStream,
        peer_id: str,
        *,
        timeout_s: float | None,
        max_message_bytes: int = limits.MAX_MESSAGE_BYTES,
    ) -> AsyncIterator[Stream]:
        """Run the stream of bytes that a peer has accepted as a stream of messages, until the context is left."""
        opened = self._resumable.opened(raw, peer_id, timeout_s=timeout_s, max_message_bytes=max_message_bytes)
        with opened as stream:
            pump = asyncio.create_task(stream.pump())
            try:
                yield stream
            finally:
                pump.cancel()
                try:
                    await asyncio.wait((pump,))
                except asyncio.CancelledError:  # again, while it leaves
                    stream.abort()
                    raise
                stream.leave()
