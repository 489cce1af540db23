"""One part's result at one member, as it grows frame by frame: from the owner, or from whoever stands in for it.

Both send the same bytes, so whichever frame comes first counts. Before its result a frame's place in the buffer may
hold the owner's own slice, at the backup that keeps it and at the owner itself: needed until the result is there, and
no longer. One task owns it.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate, pairwise

from swarm_compression import Codec
from swarm_compression.codec import Data
from swarm_protocol.errors import SwarmError
from swarm_protocol.training_messages import Group

from swarm.training.allreduce.parts import num_values, part_frames


class PartResult:
    """`have` frames of the result, the first ones, are there; `kept` of the owner's slices have come."""

    def __init__(self, group: Group, index: int, codec: Codec) -> None:
        self.index = index
        self.owner = group.peer_ids[index]
        self.frames = part_frames(group, index)
        self.have = 0
        self.kept = 0
        sizes = [codec.encoded_bytes(num_values(frame)) for frame in self.frames]
        self._places = [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
        self.data = bytearray(sum(sizes))
        self._failure: SwarmError | None = None
        self._news = asyncio.Event()

    @property
    def complete(self) -> bool:
        return self.have == len(self.frames)

    def put(self, frame: int, data: Data) -> None:
        """The result's frame, whose size has been checked. One that is there already is ignored."""
        if frame == self.have:
            self.data[self._places[frame]] = data
            self.have_next()

    def have_next(self) -> None:
        """The result's next frame is in its place."""
        self.have += 1
        self._tell()

    def keep(self, frame: int, data: Data) -> bool:
        """The owner's slice of the frame; False if its size is wrong."""
        if len(data) != self._places[frame].stop - self._places[frame].start:
            return False
        if frame >= self.have:
            self.data[self._places[frame]] = data
        self.kept = frame + 1
        self._tell()
        return True

    def frame(self, frame: int) -> memoryview:
        """Its place, where the result is, or else the owner's slice, or at the owner what is being made. Once the
        result is there, nothing changes it."""
        return memoryview(self.data)[self._places[frame]]

    def fail(self, error: SwarmError) -> None:
        """Whoever waits for frames waits in vain."""
        self._failure = error
        self._tell()

    async def reached(self, have: int) -> None:
        """Until so many frames of the result are there. Raises what `fail` was given."""
        while self.have < have:
            if self._failure is not None:
                raise self._failure
            await self._news.wait()

    async def has(self, have: int) -> None:
        """Until so many frames of the result are there, whatever happens."""
        while self.have < have:
            await self._news.wait()

    async def keeps(self, kept: int) -> None:
        """Until so many of the owner's slices have come, or so much of the result."""
        while max(self.have, self.kept) < kept:
            await self._news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
