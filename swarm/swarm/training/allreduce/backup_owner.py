"""What a part's backup does when the part's owner fails: the owner's work, in the same attempt, with the same bytes.

The backup of a part is the owner of the next one. The owner has sent it its own slices at the beginning; those of the
other members it asks for, from the first frame on whose result it lacks itself. Slices, order and codec are the same,
so the result is the owner's, byte for byte: whoever has part of that goes on behind it. If the owner died before all
its slices were here, nobody can make its part, and the attempt fails. So it does under an aggregator that surveys the
whole part, once results have come and taken the place of the slices that it would survey.

`butterfly` owns the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarm_compression.codec import Data
from swarm_protocol.errors import PeerUnreachable, RoundError, SwarmError
from swarm_protocol.training_messages import Contribution, ReduceOpening

from swarm.training.allreduce.frame_inbox import Inbox
from swarm.training.allreduce.part_owner import PartOwner
from swarm.training.allreduce.part_result import PartResult
from swarm.training.allreduce.part_streams import PartStreams
from swarm.training.allreduce.parts import num_values

MIN_MEMBERS = 3
"""Of two members, none can do without the other."""


def backup_of(part: int, num_members: int) -> int:
    """The member, by rank, who stands in for the owner of `part`."""
    return (part + 1) % num_members


class StandIn:
    """For the owner of `part`."""

    def __init__(self, streams: PartStreams, part: PartResult) -> None:
        self._streams = streams
        self._work = PartOwner(streams.scheme, streams.group)
        self._part = part
        self._limit_s = streams.group.reduce_s / 2

    async def run(self) -> None:
        """Until the part is complete. Raises PeerError with the name of whoever lets it down, and RoundError."""
        part, failure = self._part, None
        if self._work.has_survey and part.have:
            raise RoundError("the owner has failed in the midst of its results, which its backup cannot make")
        here = (self._streams.me, part.owner)
        others = [member.peer_id for member in self._work.contributors if member.peer_id not in here]
        streams = self._streams
        inboxes, first = {peer: Inbox(peer, streams.heard) for peer in others}, part.have
        async with asyncio.TaskGroup() as tasks:
            pulls = [tasks.create_task(self._pull(peer, first, inbox)) for peer, inbox in inboxes.items()]
            try:
                await self._reduce(first, inboxes)
            except SwarmError as error:
                failure = error
            for pull in pulls:
                pull.cancel()
        if failure is not None:
            raise failure

    async def _pull(self, peer: str, first: int, inbox: Inbox) -> None:
        try:
            opening = ReduceOpening(kind="slices", part=self._part.index, frame=first)
            async with self._streams.open(peer, opening) as stream:
                await inbox.fill(stream)
        except SwarmError as error:
            inbox.fail(error)

    async def _reduce(self, first: int, inboxes: dict[str, Inbox]) -> None:
        off_loop, part, work = self._streams.off_loop, self._part, self._work
        surveyed = []
        for index in range(first, len(part.frames)) if work.has_survey else ():
            surveyed.append(await self._slices(index, inboxes))
            await off_loop(work.survey, surveyed[-1], num_values(part.frames[index]))
        await off_loop(work.decide)
        for index in range(first, len(part.frames)):
            encoded = surveyed[index - first] if surveyed else await self._slices(index, inboxes)
            if part.have <= index:
                frame = part.frames[index]
                buffer = self._streams.buffer(frame)
                await off_loop(work.reduce, encoded, num_values(frame), buffer)
                part.put(index, buffer)

    async def _slices(self, index: int, inboxes: dict[str, Inbox]) -> Sequence[Data]:
        return [await self._slice_of(member, index, inboxes) for member in self._work.contributors]

    async def _slice_of(self, member: Contribution, index: int, inboxes: dict[str, Inbox]) -> Data:
        peer = member.peer_id
        if peer == self._streams.me:
            return await self._streams.encoded(self._part.frames[index])
        try:
            async with asyncio.timeout(self._limit_s):
                if peer != self._part.owner:
                    return await self._streams.expect(peer, inboxes[peer].take)
                await self._part.keeps(index + 1)
        except TimeoutError:
            raise PeerUnreachable("its slices are not all there", peer_id=peer) from None
        return bytes(self._part.frame(index))  # the result may take its place meanwhile
