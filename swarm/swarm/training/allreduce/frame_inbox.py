"""The frames of one incoming stream, received as they come by the task that may use the stream, for another task.

A stream is its handler's, and gone when the other side leaves: what it had sent by then must not be lost with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm_protocol.errors import PeerUnreachable, PeerViolation, SwarmError

from swarm.network.interface import EndOfStream, Stream

MIN_AHEAD_FRAMES = 3
"""What a member sends to an owner before it waits for anything: slices travel while another one is worked on. Over long
lines this bounds the rate, and with it what can be measured of them."""

ROOM_FRAMES = 16
"""Received and not yet taken: more than members have on their way (`exchange`), unless whole parts are surveyed."""


class Inbox:
    """`on_frame` hears of each frame as it comes."""

    def __init__(self, peer: str, on_frame: Callable[[str], None]) -> None:
        self._peer = peer
        self._on_frame = on_frame
        self._frames: asyncio.Queue[bytes | SwarmError] = asyncio.Queue()
        self._room = asyncio.Semaphore(ROOM_FRAMES)
        self._error: SwarmError | None = None
        self.num_received = 0
        self.is_filling = False

    async def fill(self, stream: Stream) -> None:
        """Until the other side has finished, failed, or left."""
        self.is_filling = True
        try:
            while True:
                await self._room.acquire()
                self._frames.put_nowait(await stream.receive())
                self.num_received += 1
                self._on_frame(self._peer)
        except EndOfStream:
            self._frames.put_nowait(PeerViolation("it sent too few values", peer_id=self._peer))
        except SwarmError as error:
            self._frames.put_nowait(error)
        except asyncio.CancelledError:
            self._frames.put_nowait(PeerUnreachable("it has left the reduction", peer_id=self._peer))
            raise
        finally:
            self.is_filling = False

    def fail(self, error: SwarmError) -> None:
        """Nothing more comes."""
        self._frames.put_nowait(error)

    async def take(self) -> bytes:
        """The next frame. Raises what ended the stream, once all before it are taken."""
        if self._error is None:
            item = await self._frames.get()
            self._room.release()
            if not isinstance(item, SwarmError):
                return item
            self._error = item
        raise self._error
