"""The reduction of one part by its owner.

The owner reads the members' slices frame by frame over the streams that they open, aggregates each frame
(`part_reducer`), and hands the encoded result to all members. If the owner fails, its backup makes the part
(`backup_owner`).

`butterfly` owns the tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from swarm_compression.codec import Data
from swarm_protocol.errors import PeerError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.training_messages import Contribution, ReduceOpening

from swarm.network.interface import EndOfStream, Stream
from swarm.training.allreduce.made_part import MadePart
from swarm.training.allreduce.part_reducer import PartReducer
from swarm.training.allreduce.part_streams import FrameInbox, PartStreams, not_of_others
from swarm.training.allreduce.parts import PartResult, backup_peer

logger = logging.getLogger(__name__)

OPENING_S = 1.0
"""Slices to an owner on a slow connection wait so long for its stream. Members learn of their group within a fraction
of this of each other."""


async def reduce_part(
    reducer: PartReducer,
    num_frames: int,
    contribution_frame: Callable[[Contribution, int], Awaitable[Data]],
    reduce_frame: Callable[[int, Sequence[Data]], Awaitable[None]],
) -> None:
    """Reduce the frames one by one. `contribution_frame` gets a member's slice of the frame with an index."""
    for index in range(num_frames):
        # no variable holds a frame's slices while those of the next one arrive
        await reduce_frame(index, [await contribution_frame(member, index) for member in reducer.contributors])


class PartOwner:
    """Reduces the part that this member owns. `part` is where the result grows; `close` ends the streams that wait.

    What it waits for arrives over the streams that other members open; the task that accepted a stream serves it.
    """

    def __init__(self, streams: PartStreams, part: PartResult) -> None:
        self._streams = streams
        self._group = streams.group
        self._part = part
        self.made = made_part(streams, part)
        if self.made is not None:
            self.made.commit(streams.me, streams.own_proof(part.index))
        self.reducer = PartReducer.of_group(streams.scheme, streams.group)
        self._inboxes = {peer: FrameInbox(peer, streams.heard) for peer in self._group.peer_ids}
        self._accepted: dict[str, asyncio.Future[Stream]] = {}
        self._delivering: dict[str, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        for stream in self._accepted.values():
            stream.cancel()

    async def serve(self, peer: str, opening: ReduceOpening, stream: Stream) -> None:
        """Receive `peer`'s slices and keep the stream for its result, until the reduction has ended."""
        if self.made is not None:
            self.made.commit(peer, opening.proof)
        accepted = self._accepted_from(peer)
        if not accepted.done():
            accepted.set_result(stream)
        try:
            await self._inboxes[peer].fill(stream)
            await self._closed.wait()
        finally:
            # a stream belongs to its handler: nobody may use it after this
            self.stop_delivery(peer)

    async def until_opened_by(self, peer: str) -> None:
        """Return once `peer` has opened its stream to this part, or has had OPENING_S for that."""
        if self._part.frames:
            with suppress(TimeoutError):
                async with asyncio.timeout(OPENING_S):
                    await asyncio.shield(self._accepted_from(peer))

    def stop_delivery(self, peer: str) -> None:
        """Send no more of the result to `peer`."""
        if delivering := self._delivering.get(peer):
            delivering.cancel()

    def lacks(self, peer: str) -> bool:
        """Return whether `peer` left before all its slices had arrived: without them this part cannot be reduced."""
        inbox, contributes = self._inboxes[peer], peer in [each.peer_id for each in self.reducer.contributors]
        return contributes and not inbox.is_filling and inbox.num_received < len(self._part.frames)

    async def reduce(self) -> None:
        await reduce_part(self.reducer, len(self._part.frames), self._contribution_frame, self._reduce_frame)

    async def _reduce_frame(self, index: int, encoded: Sequence[Data]) -> None:
        streams, frame = self._streams, self._part.frames[index]
        if index == 0:
            await streams.failpoints.reached("round.reducing")
        buffer = self._part.frame(index)
        if self.reducer.is_quick:
            self.reducer.reduce(encoded, frame, buffer)
        else:
            await streams.off_loop(self.reducer.reduce, encoded, frame, buffer)
        if index == 0:
            await streams.failpoints.reached("round.reduced")
        self._part.have_next()

    async def hand_out(self) -> None:
        """Send the result to all other members, and meanwhile this member's slices to the backup."""
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._leave_with_backup(), name="leave with backup")
            async with asyncio.TaskGroup() as deliveries:
                for peer in self._group.peer_ids:
                    if peer != self._part.owner:
                        self._delivering[peer] = deliveries.create_task(self._deliver(peer), name="deliver")
            keeping.cancel()

    async def _contribution_frame(self, member: Contribution, index: int) -> Data:
        peer = member.peer_id
        if peer == self._part.owner:
            # where the result will take its place
            buffer = self._part.frame(index)
            await self._streams.encode(self._part.frames[index], buffer)
            if self.made is not None:
                self.made.keep(peer, bytes(buffer))
            return buffer
        # half of the time that members wait for the result: the owner must find and name the peer that delays all
        limit_s = self._group.reduce_s / 2
        try:
            data = await self._streams.expect(peer, self._inboxes[peer], limit_s)
        except TimeoutError:
            raise PeerError(f"it sent no slice within {limit_s:.0f} s", peer_id=peer) from None
        except SwarmError as error:
            raise not_of_others(error, peer) from error
        if self.made is not None:
            self.made.keep(peer, data)
        return data

    async def _deliver(self, peer: str) -> None:
        """Send the result to `peer`. A failure concerns `peer` alone."""
        try:
            stream = await self._accepted_from(peer)
            sending = self._streams.send_result(stream, self._part, phase="round.deliver")
            await self._streams.while_there(peer, sending)
            await stream.finish()
        except SwarmError as error:
            logger.info("could not hand a result to %s: %s", short_id(peer), error)

    async def _leave_with_backup(self) -> None:
        backup = backup_peer(self._group, self._part.index)
        if backup is None or not self._streams.contributes:
            return
        try:
            opening = self._streams.slices_opening("keep", self._part.index)
            async with self._streams.open(backup, opening) as stream:
                await self._streams.send_slices(stream, self._part)
                await stream.finish()
                with suppress(EndOfStream):
                    while True:  # the other side ends the stream once it has everything
                        await stream.receive()
        except SwarmError as error:
            logger.warning("%s cannot stand in for this member: %s", short_id(backup), error)

    def _accepted_from(self, peer: str) -> asyncio.Future[Stream]:
        if peer not in self._accepted:
            self._accepted[peer] = asyncio.get_running_loop().create_future()
        return self._accepted[peer]


def made_part(streams: PartStreams, part: PartResult) -> MadePart | None:
    """Return what keeps the slices of `part`; None if nothing is proved."""
    return MadePart(streams.group, part, streams.scheme.codec) if streams.proves else None
