"""The streams that this node opens: each has an id, and goes on over another connection when it loses its own.

The counterpart of `stream_server`. What a stream does belongs to `libp2p_stream`, how it goes on to `stream_resume`.
The task that opens a stream owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm_protocol import limits

from swarm.network.interface import Stream
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.libp2p_stream import Libp2pStream
from swarm.network.libp2p.path_watch import PathWatch
from swarm.network.libp2p.sent_frames import SentFrames
from swarm.network.libp2p.stream_resume import ResumableStreams, Resumption, new_id, reopening


class OpenedStreams:
    """`resumable` hears of each stream, so that its other side can ask for it again."""

    def __init__(self, host: Host, watch: PathWatch, resumable: ResumableStreams, resume_protocol: str) -> None:
        self._host = host
        self._watch = watch
        self._resumable = resumable
        self._resume_protocol = resume_protocol

    @asynccontextmanager
    async def open(self, peer_id: str, protocol: str, max_bytes: int) -> AsyncIterator[Stream]:
        """Open a stream without a deadline of its own, for a call, which has one deadline for everything."""
        reader, writer = await self._host.open_stream(peer_id, protocol)
        async with self.run(reader, writer, peer_id, timeout_s=None, max_message_bytes=max_bytes) as stream:
            yield stream

    @asynccontextmanager
    async def run(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer_id: str,
        *,
        timeout_s: float | None,
        max_message_bytes: int = limits.MAX_MESSAGE_BYTES,
    ) -> AsyncIterator[Stream]:
        """Run the stream of bytes that a peer has accepted as a stream of messages, until the context is left."""
        stream_id = new_id()
        writer.write(stream_id)
        reconnect = reopening(self._host, self._watch.reconnector, self._resume_protocol, peer_id, stream_id)
        stream = Libp2pStream(
            reader,
            writer,
            peer_id=peer_id,
            timeout_s=timeout_s,
            traffic=self._host.traffic,
            unread=self._host.unread,
            resumption=Resumption(sent=SentFrames(peer_id, self._host.unacknowledged), reconnect=reconnect),
            max_message_bytes=max_message_bytes,
        )
        pump = asyncio.create_task(stream.pump())
        try:
            with self._resumable.opened(peer_id, stream_id, stream.break_off), self._watch.watching(stream):
                yield stream
        finally:
            pump.cancel()
            try:
                await asyncio.wait((pump,))
            except asyncio.CancelledError:  # again, while it leaves
                stream.abort()
                raise
            stream.leave()
