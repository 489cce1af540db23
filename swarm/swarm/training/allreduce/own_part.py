"""The part that this member owns: it reduces the frames as the slices come, and hands the result to all others.

Leaves the arithmetic to `part_owner`. What it waits for comes over the streams that other members open; each of them is
served by the task that accepted it (`serve`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from swarm_compression.codec import Data
from swarm_protocol.errors import PeerError, SwarmError
from swarm_protocol.training_messages import ReduceOpening

from swarm.network.interface import EndOfStream, Stream
from swarm.training.allreduce.backup_owner import MIN_MEMBERS, backup_of
from swarm.training.allreduce.frame_inbox import Inbox
from swarm.training.allreduce.part_owner import PartOwner
from swarm.training.allreduce.part_result import PartResult
from swarm.training.allreduce.part_streams import PartStreams, not_of_others
from swarm.training.allreduce.parts import num_values

logger = logging.getLogger(__name__)


class OwnPart:
    """`part` is where the result grows; `close` ends what still waits."""

    def __init__(self, streams: PartStreams, part: PartResult) -> None:
        self._streams = streams
        self._group = streams.group
        self._part = part
        self._owner = PartOwner(streams.scheme, streams.group)
        self.report = self._owner.report
        self._inboxes = {peer: Inbox(peer, streams.heard) for peer in self._group.peer_ids}
        self._accepted: dict[str, asyncio.Future[Stream]] = {}
        self._delivering: dict[str, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()

    @property
    def lessened(self) -> dict[str, float]:
        return self._owner.lessened

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        for stream in self._accepted.values():
            stream.cancel()

    async def serve(self, peer: str, stream: Stream) -> None:
        """`peer` sends its slices and gets the result. Kept until the reduction has ended."""
        accepted = self._accepted_from(peer)
        if not accepted.done():
            accepted.set_result(stream)
        try:
            await self._inboxes[peer].fill(stream)
            await self._closed.wait()
        finally:
            # a stream is its handler's: nobody may use it after this
            self.let_go(peer)

    def let_go(self, peer: str) -> None:
        """`peer` gets nothing more."""
        if delivering := self._delivering.get(peer):
            delivering.cancel()

    def lacks(self, peer: str) -> bool:
        """Whether it is gone before its slices were here: without them this part cannot be made."""
        inbox, contributes = self._inboxes[peer], peer in [each.peer_id for each in self._owner.contributors]
        return contributes and not inbox.is_filling and inbox.num_received < len(self._part.frames)

    async def reduce(self) -> None:
        """Frame after frame."""
        part, off_loop = self._part, self._streams.off_loop
        surveyed = deque[list[Data]]()
        for index, frame in enumerate(part.frames if self._owner.has_survey else ()):
            surveyed.append(await self._slices(index))
            await off_loop(self._owner.survey, surveyed[-1], num_values(frame))
        await off_loop(self._owner.decide)
        self.report = self._owner.report
        for index in range(len(part.frames)):
            # nobody holds a frame's slices while those of the next one come
            await self._reduce_frame(index, surveyed.popleft() if surveyed else await self._slices(index))

    async def _reduce_frame(self, index: int, encoded: Sequence[Data]) -> None:
        streams, frame = self._streams, self._part.frames[index]
        if index == 0:
            await streams.faults.reached("round.reducing")
        place = self._part.frame(index)
        if self._owner.is_quick:
            self._owner.reduce(encoded, num_values(frame), place)
        else:
            await streams.off_loop(self._owner.reduce, encoded, num_values(frame), place)
        if index == 0:
            await streams.faults.reached("round.reduced")
        self._part.have_next()

    async def hand_out(self) -> None:
        """Give all others the result, and meanwhile the backup what it would need to make it."""
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._leave_with_backup(), name="leave with backup")
            async with asyncio.TaskGroup() as deliveries:
                for peer in self._group.peer_ids:
                    if peer != self._part.owner:
                        self._delivering[peer] = deliveries.create_task(self._deliver(peer), name="deliver")
            keeping.cancel()

    async def _slices(self, index: int) -> list[Data]:
        return [await self._slice_of(member.peer_id, index) for member in self._owner.contributors]

    async def _slice_of(self, peer: str, index: int) -> Data:
        if peer == self._part.owner:
            # where the result will take its place
            place = self._part.frame(index)
            await self._streams.encode(self._part.frames[index], place)
            return place
        # half of what members wait for the result: the owner is to find out, and to say, who keeps all waiting
        limit_s = self._group.reduce_s / 2
        try:
            async with asyncio.timeout(limit_s):
                return await self._streams.expect(peer, self._inboxes[peer].take)
        except TimeoutError:
            raise PeerError(f"it sent no slice within {limit_s:.0f} s", peer_id=peer) from None
        except SwarmError as error:
            raise not_of_others(error, peer) from error

    async def _deliver(self, peer: str) -> None:
        """Hand `peer` the result. That it cannot be had is `peer`'s loss alone."""
        try:
            stream = await self._accepted_from(peer)
            sending = self._streams.send_result(stream, self._part, phase="round.deliver")
            await self._streams.while_there(peer, sending)
            await stream.finish()
        except SwarmError as error:
            logger.info("could not hand a result to %s: %s", peer[-6:], error)

    async def _leave_with_backup(self) -> None:
        num_members = len(self._group.members)
        if num_members < MIN_MEMBERS or not self._streams.contributes:
            return
        backup = self._group.peer_ids[backup_of(self._part.index, num_members)]
        try:
            async with self._streams.open(backup, ReduceOpening(kind="keep", part=self._part.index)) as stream:
                await self._streams.send_slices(stream, self._part)
                await stream.finish()
                await _read_out(stream)
        except SwarmError as error:
            logger.warning("%s cannot stand in for this member: %s", backup[-6:], error)

    def _accepted_from(self, peer: str) -> asyncio.Future[Stream]:
        if peer not in self._accepted:
            self._accepted[peer] = asyncio.get_running_loop().create_future()
        return self._accepted[peer]


async def _read_out(stream: Stream) -> None:
    """Until the other side has taken all and ended."""
    with suppress(EndOfStream):
        while True:
            await stream.receive()
